from services.controller.loop import serve
from services.runtime.service import run_service

run_service("controller", serve)
