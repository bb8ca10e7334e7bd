package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"
	"golang.org/x/sys/unix"
)

// get asks Caddy for a page as a client on the host does, and returns the status, the headers and the body.
func (l *lab) get(t testing.TB, path string, curl ...string) (status, head, body string) {
	t.Helper()
	args := append([]string{"--root", "curl", "--silent", "--insecure", "--include", "--max-time", "20", "--write-out", "\n%{http_code}"}, curl...)
	out, _ := l.try(append(args, "https://toad.lab"+path)...)
	i := strings.LastIndexByte(out, '\n')
	status, out = out[i+1:], strings.ReplaceAll(out[:max(i, 0)], "\r\n", "\n")
	head, body, _ = strings.Cut(out, "\n\n")
	return status, strings.ToLower(head), body
}

const labReader = "-uoperator:pond"

// TestLabPageThroughCaddy goes the way of a reader: Caddy, the shared socket, the gateway, Toad. It takes Toad
// away for a while.
func TestLabPageThroughCaddy(t *testing.T) {
	l := theLab(t)
	s := l.enroll(t, "shown")
	op := s.promote(s.image("VERSION=1"))
	for _, tt := range []struct {
		name, path, status string
		curl               []string
	}{
		{"no credentials", "/", "401", nil},
		{"no credentials, a service", "/services/shown", "401", nil},
		{"no credentials, an asset", webNames["page.css"], "401", nil},
		{"wrong password", "/", "401", []string{"-uoperator:pound"}},
		{"wrong user", "/", "401", []string{"-uroot:pond"}},
		{"a bearer token", "/", "401", []string{"-HAuthorization: Bearer pond"}},
		{"right", "/", "200", []string{labReader}},
		{"a service", "/services/shown", "200", []string{labReader}},
		{"as JSON", "/services/shown.json", "200", []string{labReader}},
		{"an asset", webNames["page.css"], "200", []string{labReader}},
		{"HEAD", "/", "200", []string{labReader, "--head"}},
		{"nothing there", "/services/nobody", "404", []string{labReader}},
		{"the API", "/v1/services", "404", []string{labReader}},
		{"POST", "/", "405", []string{labReader, "-dx"}},
		{"POST to the API", "/v1/deployments", "405", []string{labReader, "-d{}"}},
		{"PUT", "/", "405", []string{labReader, "-XPUT"}},
		{"DELETE", "/services/shown", "405", []string{labReader, "-XDELETE"}},
		{"OPTIONS", "/", "405", []string{labReader, "-XOPTIONS"}},
		{"a body", "/", "400", []string{labReader, "-XGET", "-dx"}},
	} {
		status, head, body := l.get(t, tt.path, tt.curl...)
		if status != tt.status {
			t.Errorf("%s: status %s, want %s\n%s", tt.name, status, tt.status, head)
		}
		if status == "401" && (body != "" || !strings.Contains(head, "www-authenticate: basic")) {
			t.Errorf("%s: %s\n%s", tt.name, head, body)
		}
		if status != "401" {
			for _, want := range []string{"content-security-policy: default-src 'none'", "x-content-type-options: nosniff", "x-frame-options: deny", "referrer-policy: no-referrer", "strict-transport-security: max-age="} {
				if !strings.Contains(head, want) {
					t.Errorf("%s: no %s in\n%s", tt.name, want, head)
				}
			}
		}
		if strings.Contains(head, "set-cookie") {
			t.Errorf("%s: %s", tt.name, head)
		}
	}
	_, _, body := l.get(t, "/services/shown.json", labReader)
	var page webPage
	if err := json.Unmarshal([]byte(body), &page); err != nil || len(page.Services) != 1 {
		t.Fatalf("%v: %s", err, body)
	}
	v := page.Services[0]
	if page.Host != "toad.lab" || v.Current == nil || v.Current.Digest != op.Candidate.Digest || v.Operations[0].ID != op.ID ||
		v.Unit == nil || v.Unit.ActiveState != "active" || v.Unit.InvocationID != s.unit("InvocationID") || v.Container == nil || v.Container.State != "running" {
		t.Errorf("the page says %s", body)
	}

	// Another name gets nothing of the page, neither of Caddy nor, past it, of the gateway.
	if status, head, body := l.get(t, "/", labReader, "-HHost: other.lab"); strings.Contains(body, "Toad") {
		t.Errorf("another name: %s\n%s\n%s", status, head, body)
	}
	for host, want := range map[string]string{"other.lab": "421", "localhost": "421", "toad.lab:443": "421", "toad.lab": "200"} {
		if out := l.root(t, "curl -s -o /dev/null -w '%{http_code}' --unix-socket /run/toad-web/gateway.sock http://"+host+"/"); out != want {
			t.Errorf("the gateway answers %s with %s, want %s", host, out, want)
		}
	}
	if out := l.root(t, "stat -c '%a %U %G' /run/toad-web /run/toad-web/gateway.sock"); out != "2710 toad caddy\n660 toad caddy" {
		t.Errorf("the socket: %s", out)
	}
	if out, status := l.try("--root", "setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "curl", "-s", "--unix-socket", "/run/toad-web/gateway.sock", "http://toad.lab/"); status != 7 {
		t.Errorf("nobody on the socket: %d %s", status, out)
	}
	if out := l.exec(t, "podman port toad-gateway"); out != "" {
		t.Errorf("the gateway's ports on the host: %s", out)
	}

	// Without Toad the reader is told so, and sees the page again when Toad is back.
	l.exec(t, "systemctl --user stop toad.service")
	status, head, body := l.get(t, "/", labReader)
	if status != "502" || !strings.Contains(body, "Toad does not answer") || !strings.Contains(head, "default-src 'none'") {
		t.Errorf("without Toad: %s\n%s\n%s", status, head, body)
	}
	l.exec(t, "systemctl --user start toad.service")
	l.eventuallyFor(t, time.Minute, "the page is back", func() bool {
		status, _, _ := l.get(t, "/services/shown", labReader)
		return status == "200"
	})
	l.exec(t, "systemctl --user restart toad-gateway.service")
	l.eventuallyFor(t, time.Minute, "the page is back behind a new socket", func() bool {
		status, _, _ := l.get(t, "/", labReader)
		return status == "200"
	})
}

// labBrowser is a browser on the lab's host: it has the network of that, and nothing else of it.
func (l *lab) browser(t testing.TB) *browser {
	t.Helper()
	pid, err := os.ReadFile(filepath.Join(labDir(), l.name, "pid"))
	must(t, err)
	script := filepath.Join(t.TempDir(), "chromium")
	must(t, os.WriteFile(script, fmt.Appendf(nil, "#!/bin/sh\nexec nsenter --target %s --net chromium \"$@\"\n", strings.TrimSpace(string(pid))), 0o755))
	b := newBrowser(t, chromedp.ExecPath(script), chromedp.IgnoreCertErrors, chromedp.Flag("host-resolver-rules", "MAP toad.lab 127.0.0.1"))
	_, err = chromedp.Call(b.ctx, network.SetExtraHTTPHeaders, network.SetExtraHTTPHeadersParams{Headers: network.Headers{"Authorization": "Basic b3BlcmF0b3I6cG9uZA=="}})
	must(t, err)
	return b
}

// TestLabPageInABrowser follows a deployment to its promotion and one to its rollback, in a real browser through
// Caddy: with scripts, where the page looks again by itself, and without, and at each turn on a phone and on a desk.
// The checker of accessibility is a script itself, so that it checks the pages with scripts alone; they are the same
// documents.
func TestLabPageInABrowser(t *testing.T) {
	t.Parallel()
	l := theLab(t)
	b := l.browser(t)
	for _, with := range []struct {
		name   string
		script bool
	}{{"script", true}, {"plain", false}} {
		s := l.enroll(t, "seen-"+with.name, func(s *labService) {
			s.en.Probation.StabilityWindow = duration(12 * time.Second)
			s.en.Probation.RolloutDeadline = duration(90 * time.Second)
			s.en.Probation.StartupDeadline = duration(30 * time.Second)
		})
		see := func(what string) string { return b.until(90*time.Second, what, !with.script) }
		// picture looks at the page on both, which have to say the same, and stays at the desk.
		picture := func(what string, parts ...string) {
			for _, on := range []struct {
				name          string
				width, height int64
				scheme        string
			}{{"phone", 390, 844, "light"}, {"desktop", 1280, 900, "dark"}} {
				b.as(on.width, on.height, on.scheme, with.script)
				name := with.name + "-" + on.name + "-" + what
				wantParts(t, name, b.text(), parts...)
				if with.script {
					b.accessible(name)
				}
				b.shot(name)
			}
		}
		b.as(390, 844, "light", with.script)
		s.view() // the page asks no disk: it knows of a service that somebody asked for, or a moment later
		b.run(chromedp.Navigate("https://toad.lab/services/" + s.name))
		see("Nothing was deployed yet.")

		good := s.submit(s.image("VERSION=1"))
		text := see("Ready without a break")
		wantParts(t, "the page in probation", text, "of 12 s", "0 of 1 allowed", "Time left", good.Candidate.Digest[7:19])
		picture("probation", s.name) // which may end meanwhile
		text = see(fmt.Sprintf("Generation %d", good.Generation))
		wantParts(t, "the page after the promotion", text, good.Candidate.Digest, "Promoted")
		s.expect(s.await(good.ID, nil), "promoted", "")
		picture("promoted", fmt.Sprintf("Generation %d", good.Generation), "Promoted")

		b.as(390, 844, "light", with.script)
		bad := s.submit(s.image("VERSION=2", "EXIT_AFTER=2s"))
		text = see("restart_budget")
		wantParts(t, "the page of the rollback", text, bad.Candidate.Digest[7:19])
		s.expect(s.await(bad.ID, nil), "rolled_back", "restart_budget")
		text = b.untilIn("#op-"+bad.ID, 90*time.Second, "Ended", !with.script) // the newest, which is open
		wantParts(t, "the operation after the rollback", text, "Rolled back", "restart_budget", bad.Candidate.Digest[7:19])
		picture("rolled-back", "Rolled back", fmt.Sprintf("Generation %d", good.Generation), good.Candidate.Digest)

		b.run(chromedp.Navigate("https://toad.lab/"))
		picture("overview", s.name, "restart_budget")
	}
	b.clean()
}

// TestLabNoPortAnswersAWorkload looks from inside enrolled workloads, one on the network that it shares with Toad and
// one on a network of its own, for a port of Toad's or the gateway's that answers a byte: at their addresses and at
// the host's, with a valid token, with the gateway's credential, and without.
func TestLabNoPortAnswersAWorkload(t *testing.T) {
	t.Parallel()
	l := theLab(t)
	s := l.enroll(t, "curious")
	s.promote(s.image("VERSION=1"))
	var token wireIssued
	if p := l.mustCall(t, "POST", "/v1/tokens", tokenRequest{Service: s.name, Label: "scan", Verbs: []string{"read"}}, &token); p != nil {
		t.Fatalf("%+v", p)
	}
	secret := l.exec(t, "cat ~/.local/share/toad/run/gateway/secret")

	// Toad is not on the other network, so that what runs there is a candidate: nobody sees it ready.
	l.write(t, ".config/containers/systemd/_infra/apart/apart.network", "[Network]\nNetworkName=apart\n")
	t.Cleanup(func() {
		l.try("sh", "-c", "systemctl --user stop apart-network.service; podman network rm -f apart; rm -rf .config/containers/systemd/_infra/apart; systemctl --user daemon-reload")
	})
	apart := l.enroll(t, "apart", func(s *labService) {
		s.en.Readiness.Network, s.tmpl = "apart", strings.Replace(s.tmpl, "apps.network", "apart.network", 1)
		s.en.Probation.StartupDeadline, s.en.Probation.RolloutDeadline = duration(4*time.Minute), duration(5*time.Minute)
	})
	candidate := apart.submit(apart.image("VERSION=1", "READY_AFTER=1h"))
	apart.awaitState(candidate.ID, "probation")
	apart.eventually("the workload runs", func() bool { return len(apart.running()) == 1 })

	// in is a command in the network of a container.
	in := func(name, command string) []string {
		return []string{"--root", "sh", "-c", fmt.Sprintf(`exec nsenter -t "$(setpriv --reuid 1001 --regid 1001 --init-groups env HOME=/home/toad XDG_RUNTIME_DIR=/run/user/1001 podman inspect -f '{{.State.Pid}}' %s)" -n %s`, name, command)}
	}
	inside := func(name, command string) string {
		t.Helper()
		out, status := l.try(in(name, command)...)
		if status != 0 {
			t.Fatalf("in %s: %s: exit %d\n%s", name, command, status, out)
		}
		return out
	}

	// What listens is known from the containers themselves, so that nothing else has to be guessed.
	var ports []string
	for _, name := range []string{"toad", "toad-gateway"} {
		for line := range strings.Lines(inside(name, "ss --listening --numeric --tcp --udp --no-header")) {
			f := strings.Fields(line)
			if len(f) > 4 {
				ports = append(ports, f[4][strings.LastIndexByte(f[4], ':')+1:])
			}
		}
	}
	slices.Sort(ports)
	if ports = slices.Compact(ports); !slices.Equal(ports, []string{"8440", "8441"}) {
		t.Fatalf("Toad and its gateway listen on %v", ports)
	}
	// Theirs, the gateways of all networks, the host's, and what Podman calls host.containers.internal.
	networks := l.exec(t, `podman inspect -f '{{range $n, $v := .NetworkSettings.Networks}}{{$n}} {{end}}' toad toad-gateway`)
	if slices.Contains(strings.Fields(networks), "apart") {
		t.Fatalf("Toad's networks are %s", networks)
	}
	host := strings.Fields(l.root(t, `ip -oneline -4 address show scope global | awk '{ sub("/.*", "", $4); print $4 }'`))
	if !slices.Contains(host, "198.51.100.2") {
		t.Fatalf("the host's addresses: %v", host)
	}
	addresses := strings.Fields(l.exec(t, `podman inspect -f '{{range .NetworkSettings.Networks}}{{.IPAddress}} {{.Gateway}} {{end}}' toad toad-gateway`) + " " +
		l.exec(t, `podman inspect -f '{{range .NetworkSettings.Networks}}{{.Gateway}} {{end}}' curious apart`))
	slices.Sort(addresses)
	if addresses = slices.Compact(addresses); len(addresses) < 5 {
		t.Fatalf("addresses: %v", addresses)
	}
	addresses = append(append(addresses, host...), "169.254.1.2")

	var scans sync.WaitGroup
	for _, name := range []string{s.name, apart.name} {
		// The way to the host is open: what answers nothing there is closed, and not out of reach.
		if out := inside(name, `curl -s -o /dev/null -w '%{http_code}' --max-time 10 http://192.0.2.10:5000/v2/`); out == "000" {
			t.Errorf("%s does not reach the host", name)
		}
		var reached atomic.Int64
		var of sync.WaitGroup
		for _, header := range []string{"X: x", "Authorization: Bearer " + token.Token, "Authorization: Bearer " + secret} {
			of.Go(func() {
				out, _ := l.try(in(name, fmt.Sprintf(`sh -c "curl -s --parallel --parallel-immediate --parallel-max 200 --connect-timeout 2 --max-time 4 -o /dev/null -H '%s' -H 'Host: toad.lab' -w '%%{http_code} %%{size_download} %%{size_header} %%{time_connect} %%{url}\n' 'http://{%s}:{%s}/{,index.json,v1/services,v1/services/%s}' || :"`,
					header, strings.Join(addresses, ","), strings.Join(ports, ","), s.name))...)
				lines := strings.Split(out, "\n")
				if want := len(addresses) * len(ports) * 4; len(lines) != want {
					t.Errorf("%d requests were made in %s, want %d:\n%s", len(lines), name, want, out)
				}
				for _, line := range lines {
					var code, size, head int
					var connected float64
					var url string
					if _, err := fmt.Sscan(line, &code, &size, &head, &connected, &url); err != nil || code != 0 || size != 0 || head != 0 {
						t.Errorf("in %s, with %s: %s", name, strings.Fields(header)[0], line)
					}
					if connected > 0 {
						reached.Add(1)
					}
				}
			})
		}
		scans.Go(func() {
			of.Wait()
			t.Logf("in %s: %d connections were taken, and closed without a byte", name, reached.Load())
			if name == s.name && reached.Load() == 0 {
				t.Error("no connection was taken at all: there was nothing to be tested")
			}
		})
	}
	scans.Wait()
	// The same request with the same token is answered where it may be.
	if out := l.exec(t, fmt.Sprintf(`curl -s -o /dev/null -w '%%{http_code}' -H 'Authorization: Bearer %s' http://127.0.0.1:8440/v1/services/%s || :`, token.Token, s.name)); out != "200" {
		t.Errorf("on the host the token is answered with %s", out)
	}
	if op := apart.await(candidate.ID, func(wireOperation) bool { return true }); op.State != "probation" || len(apart.running()) != 1 {
		t.Errorf("the workload apart did not run all the while: its operation is %s", op.State)
	}
	// Any other port is closed: a whole range, on the network they share.
	shared := l.exec(t, `podman inspect -f '{{.NetworkSettings.Networks.apps.IPAddress}}' toad`)
	pid := l.exec(t, `podman inspect -f '{{.State.Pid}}' `+s.name)
	if open := scan(t, l.path("/proc/"+pid+"/ns/net"), shared); !slices.Equal(open, []int{8440, 8441}) {
		t.Errorf("a workload reaches %v of Toad's", open)
	}
}

// scan connects to every port of an address from inside a network namespace, and returns those that take the
// connection. None may answer a byte.
func scan(t *testing.T, namespace, address string) []int {
	t.Helper()
	var mu sync.Mutex // guards what follows
	var open []int
	next := 0
	var scanners sync.WaitGroup
	for range 32 {
		scanners.Go(func() {
			runtime.LockOSThread() // and never unlock: the thread ends with its namespace
			ns, err := os.Open(namespace)
			if err == nil {
				defer ns.Close()
				err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
			}
			if err != nil {
				t.Errorf("entering %s: %v", namespace, err)
				return
			}
			for {
				mu.Lock()
				next++
				port := next
				mu.Unlock()
				if port > 65535 {
					return
				}
				c, err := net.DialTimeout("tcp", net.JoinHostPort(address, strconv.Itoa(port)), 2*time.Second)
				if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, os.ErrDeadlineExceeded) {
					continue
				} else if err != nil {
					t.Errorf("port %d: %v", port, err)
					return
				}
				fmt.Fprint(c, "GET / HTTP/1.0\r\n\r\n")
				_ = c.SetReadDeadline(time.Now().Add(4 * time.Second))
				if n, _ := c.Read(make([]byte, 1)); n > 0 {
					t.Errorf("port %d answers", port)
				}
				c.Close()
				mu.Lock()
				open = append(open, port)
				mu.Unlock()
			}
		})
	}
	scanners.Wait()
	slices.Sort(open)
	return open
}
