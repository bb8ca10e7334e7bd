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
	setType(w, "application/json")
	_, _ = w.Write(description)
	return nil
}
