package main

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// inNetns runs a shell line that speaks TCP (bash, its /dev/tcp) in the network of a running container, for five
// seconds at most: what is dropped on the way connects for minutes.
func (l *lab) inNetns(t testing.TB, container, line string) string {
	t.Helper()
	pid := l.exec(t, "podman inspect --format '{{.State.Pid}}' "+container)
	return l.root(t, fmt.Sprintf("timeout 5 nsenter --net --target %s -- bash -c '%s'; true", pid, strings.ReplaceAll(line, "'", `'\''`)))
}

// ask is a line that connects, asks with a token (none if it is empty) and prints whatever comes within
// three seconds, after "open" if it could connect.
func ask(address, port, token, path string) string {
	header := ""
	if token != "" {
		header = `Authorization: Bearer ` + token + `\r\n`
	}
	return fmt.Sprintf(`exec 3<>/dev/tcp/%s/%s && echo open && printf 'GET %s HTTP/1.1\r\nHost: toad\r\n%sConnection: close\r\n\r\n' >&3; timeout 3 cat <&3`, address, port, path, header)
}

// The API answers on the host's loopback with a token; from inside a workload, and from another container
// of each of Toad's networks, no port of Toad answers a byte, whatever is shown.
func TestLabTokens(t *testing.T) {
	l := theLab(t)
	s := l.enroll(t, "tokens")
	s.promote(s.image())
	var issued wireIssued
	if p := l.mustCall(t, "POST", "/v1/tokens", tokenRequest{Service: "tokens", Label: "lab", Verbs: []string{"read"}}, &issued); p != nil {
		t.Fatalf("issuing: %+v", p)
	}
	onHost := func(token string) string {
		return l.exec(t, "bash -c '"+strings.ReplaceAll(ask("127.0.0.1", "8440", token, "/v1/services/tokens"), "'", `'\''`)+"'; true")
	}
	l.eventuallyFor(t, 10*time.Second, "the token is let in on the host", func() bool {
		out := onHost(issued.Token)
		return strings.Contains(out, "HTTP/1.1 200") && strings.Contains(out, `"service": "tokens"`)
	})
	for what, token := range map[string]string{"no token": "", "another": "toad_" + issued.ID + "_" + strings.Repeat("0", 64)} {
		if out := onHost(token); !strings.Contains(out, "HTTP/1.1 401") || !strings.Contains(strings.ToLower(out), "www-authenticate: bearer") {
			t.Errorf("%s: %s", what, out)
		}
	}

	image := strings.TrimSpace(l.exec(t, "podman inspect --format '{{.ImageName}}' tokens"))
	networks := strings.Fields(l.exec(t, `podman inspect --format '{{range $n, $v := .NetworkSettings.Networks}}{{$n}} {{end}}' toad`))
	addresses := strings.Fields(l.exec(t, `podman inspect --format '{{range $n, $v := .NetworkSettings.Networks}}{{$v.IPAddress}} {{end}}' toad`))
	if len(networks) < 2 || len(addresses) != len(networks) {
		t.Fatalf("toad is on %v with %v", networks, addresses)
	}
	from := []string{"tokens"} // the enrolled workload itself
	for i, n := range networks {
		name := fmt.Sprintf("stranger%d", i)
		l.exec(t, fmt.Sprintf("podman run -d --rm --name %s --network %s %s", name, n, image))
		t.Cleanup(func() { l.try("podman", "rm", "-f", "-t0", "-i", name) })
		from = append(from, name)
	}
	for _, c := range from {
		for _, address := range addresses {
			for _, token := range []string{issued.Token, ""} {
				out := l.inNetns(t, c, ask(address, "8440", token, "/v1/services/tokens"))
				if strings.Contains(out, "HTTP/") || strings.Contains(out, "tokens\"") {
					t.Errorf("%s is answered at %s: %s", c, address, out)
				}
			}
		}
	}
	// It could connect at all: what kept it out is Toad.
	if out := l.inNetns(t, "stranger0", ask(addresses[0], "8440", "", "/")); !strings.Contains(out, "open") {
		t.Errorf("a container of %s cannot reach Toad, so that this test proves nothing: %s", networks[0], out)
	}

	// Revoked while Toad serves: at once, and over a restart.
	var gone wireToken
	if p := l.mustCall(t, "DELETE", "/v1/tokens/"+issued.ID, nil, &gone); p != nil || gone.Valid {
		t.Fatalf("revoking: %+v %+v", p, gone)
	}
	if out := onHost(issued.Token); !strings.Contains(out, "HTTP/1.1 401") {
		t.Errorf("revoked: %s", out)
	}
	l.killToad(t)
	l.eventuallyFor(t, time.Minute, "toad is back and refuses it", func() bool { return strings.Contains(onHost(issued.Token), "HTTP/1.1 401") })
}
