"""The values of the Helm chart as types: what `make chart` writes into `helm/joinmesh`, and why it is as it is."""
