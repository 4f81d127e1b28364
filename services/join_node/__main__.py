from services.join_node.run import serve
from services.runtime.service import run_service

run_service("join_node", serve)
