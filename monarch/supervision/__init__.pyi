from monarch.mesh.supervisor import Child as Child
from monarch.mesh.supervisor import ChildStatus as ChildStatus
from monarch.mesh.supervisor import Supervisor as Supervisor
from monarch.supervision.policy import Restart as Restart
from monarch.supervision.policy import Strategy as Strategy
