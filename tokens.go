// tokens.go knows who makes a request.
package main

import "net/http"

// caller is who makes a request: whoever may use the administration socket (the zero value), or the
// holder of a token, who may know of one service only.
type caller struct {
	token   string // its id, "" on the administration socket
	service string // the one service that the token is for
}

func (c caller) local() bool { return c.token == "" }

// actor is the caller as records and events name it.
func (c caller) actor() string {
	if c.local() {
		return "local"
	}
	return "token:" + c.token
}

// callerKey is the caller's in a request's context.
type callerKey struct{}

func callerOf(r *http.Request) caller {
	c, _ := r.Context().Value(callerKey{}).(caller)
	return c
}
