// openapi.go serves the description of the API.
package main

import (
	_ "embed"
	"net/http"
)

// description is openapi.yaml as JSON, made by its test: no YAML has to be read here.
//
//go:embed openapi.json
var description []byte

func getDescription(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(description)
	return nil
}
