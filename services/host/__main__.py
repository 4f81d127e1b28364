from services.host.run import serve
from services.runtime.service import run_service

run_service("host", serve)
