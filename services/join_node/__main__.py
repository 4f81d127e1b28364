from services.join_node.app import serve
from services.runtime.service import run_service

run_service("join_node", serve)
