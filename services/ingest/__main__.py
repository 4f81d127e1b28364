from services.ingest.loop import serve
from services.runtime.service import run_service

run_service("ingest", serve)
