package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// gatewayWorld is the gateway before a server that stands for Toad's web listener.
type gatewayWorld struct {
	t        *testing.T
	front    *httptest.Server
	upstream *httptest.Server

	mu     sync.Mutex // guards what follows
	asked  []*http.Request
	answer func(w http.ResponseWriter, r *http.Request)
}

func newGatewayWorld(t *testing.T) *gatewayWorld {
	g := &gatewayWorld{t: t}
	g.upstream = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		g.mu.Lock()
		g.asked = append(g.asked, r)
		answer := g.answer
		g.mu.Unlock()
		if answer != nil {
			answer(w, r)
			return
		}
		secure(w.Header())
		fmt.Fprint(w, "the page")
	}))
	t.Cleanup(g.upstream.Close)
	cfg := gatewayConfig{host: "toad.example.org", upstream: g.upstream.Listener.Addr().String()}
	g.front = httptest.NewServer(gatewayHandler(cfg, "s3cret", slog.New(slog.NewTextHandler(testWriter{t}, nil))))
	t.Cleanup(g.front.Close)
	return g
}

// requests is what Toad was asked since the last send.
func (g *gatewayWorld) requests() []*http.Request {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.asked)
}

// send speaks to the gateway and returns status, header and body.
func (g *gatewayWorld) send(method, host, path, body string, header ...string) (*http.Response, string) {
	g.t.Helper()
	g.mu.Lock()
	g.asked = nil
	g.mu.Unlock()
	r, err := http.NewRequest(method, g.front.URL+path, strings.NewReader(body))
	must(g.t, err)
	r.Host = host
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	res, err := http.DefaultTransport.RoundTrip(r)
	must(g.t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	must(g.t, err)
	return res, string(b)
}

func TestGatewayAnswersOneHostForReading(t *testing.T) {
	g := newGatewayWorld(t)
	const host = "toad.example.org"
	for _, tt := range []struct {
		method, host, path, body string
		status                   int
		reaches                  bool
	}{
		{"GET", host, "/", "", 200, true},
		{"GET", "TOAD.example.ORG", "/services/hello", "", 200, true},
		{"HEAD", host, "/", "", 200, true},
		{"GET", "other.example.org", "/", "", 421, false},
		{"GET", "toad.example.org.evil.example", "/", "", 421, false},
		{"GET", "toad.example.org:8443", "/", "", 421, false},
		{"GET", "localhost", "/", "", 421, false},
		{"GET", "10.89.0.2", "/", "", 421, false},
		{"POST", "other.example.org", "/", "x", 421, false},
		{"GET", "other.example.org", webNames["page.css"], "", 421, false},
		{"POST", host, "/", "", 405, false},
		{"PUT", host, "/services/hello", "x", 405, false},
		{"DELETE", host, "/", "", 405, false},
		{"PATCH", host, "/", "", 405, false},
		{"OPTIONS", host, "/", "", 405, false},
		{"TRACE", host, "/", "", 405, false},
		{"PROPFIND", host, "/", "", 405, false},
		{"GET", host, "/", "a body", 400, false},
		{"GET", host, webNames["page.css"], "", 200, false}, // its own
	} {
		res, body := g.send(tt.method, tt.host, tt.path, tt.body)
		if res.StatusCode != tt.status || (len(g.requests()) > 0) != tt.reaches {
			t.Errorf("%s %s of %s: status %d, asked Toad %d times; want %d, %v", tt.method, tt.path, tt.host, res.StatusCode, len(g.requests()), tt.status, tt.reaches)
		}
		if tt.status == 405 && res.Header.Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: Allow %q", tt.method, res.Header.Get("Allow"))
		}
		if tt.status != 421 && !strings.Contains(res.Header.Get("Content-Security-Policy"), "default-src 'none'") {
			t.Errorf("%s %s: no policy: %v", tt.method, tt.path, res.Header)
		}
		if (tt.method == "HEAD" || tt.status == 421) && body != "" {
			t.Errorf("%s %s of %s: body %q", tt.method, tt.path, tt.host, body)
		}
	}
}

func TestGatewayPassesOnNothingOfTheClient(t *testing.T) {
	g := newGatewayWorld(t)
	res, body := g.send("GET", "toad.example.org", "/services/hello?x=1", "", "Authorization", "Basic Y2xpZW50", "Proxy-Authorization", "Basic x", "Cookie", "a=b", "X-Forwarded-For", "203.0.113.1",
		"Forwarded", "for=x", "Connection", "X-Hop, upgrade", "X-Hop", "1", "Upgrade", "websocket", "Te", "trailers", "X-Anything", "1", "Range", "bytes=0-1", "User-Agent", "x")
	if res.StatusCode != 200 || body != "the page" || len(g.requests()) != 1 {
		t.Fatalf("%d %q, asked %d times", res.StatusCode, body, len(g.requests()))
	}
	r := g.requests()[0]
	if r.Host != "toad.example.org" || r.URL.String() != "/services/hello" || r.Header.Get("Authorization") != "Bearer s3cret" {
		t.Errorf("asked %s of %s with %v", r.URL, r.Host, r.Header)
	}
	for name := range r.Header {
		if name != "Authorization" && name != "User-Agent" && name != "X-Forwarded-For" || name == "X-Forwarded-For" || name == "User-Agent" && r.UserAgent() != "toad-gateway" {
			t.Errorf("Toad was told %s: %q", name, r.Header[name])
		}
	}
}

func TestGatewayBoundsAnswers(t *testing.T) {
	g := newGatewayWorld(t)
	for _, tt := range []struct {
		name   string
		answer func(w http.ResponseWriter, r *http.Request)
		status int
	}{
		{"too large", func(w http.ResponseWriter, r *http.Request) { io.CopyN(w, zeros{}, maxPage+1) }, 502},
		{"as large as may be", func(w http.ResponseWriter, r *http.Request) { io.CopyN(w, zeros{}, maxPage) }, 200},
		{"broken off", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "10")
			w.Write([]byte("x"))
			panic(http.ErrAbortHandler)
		}, 502},
		{"wrong credential", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("WWW-Authenticate", "Basic")
			w.WriteHeader(401)
		}, 502},
		{"redirect", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "https://evil.example/", http.StatusFound)
		}, 502},
		{"failed", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(500) }, 502},
		{"not found", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(404) }, 404},
		{"headers without end", func(w http.ResponseWriter, r *http.Request) { w.Header().Set("X", strings.Repeat("x", 64<<10)) }, 502},
	} {
		g.mu.Lock()
		g.answer = tt.answer
		g.mu.Unlock()
		res, body := g.send("GET", "toad.example.org", "/", "")
		if res.StatusCode != tt.status || res.Header.Get("WWW-Authenticate") != "" || res.Header.Get("Location") != "" {
			t.Errorf("%s: status %d, %v", tt.name, res.StatusCode, res.Header)
		}
		if tt.status == 502 && (!strings.Contains(body, "Toad does not answer") || strings.Contains(body, "127.0.0.1")) {
			t.Errorf("%s: %s", tt.name, body)
		}
	}
	g.upstream.Close()
	res, body := g.send("GET", "toad.example.org", "/", "")
	if res.StatusCode != 502 || !strings.Contains(body, "Toad does not answer") || !strings.Contains(res.Header.Get("Content-Security-Policy"), "default-src 'none'") || strings.Contains(body, "dial") {
		t.Errorf("without Toad: %d %v\n%s", res.StatusCode, res.Header, body)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// TestGatewaySocket runs the whole command: the socket in place of a stale one, its mode, its end.
func TestGatewaySocket(t *testing.T) {
	dir, err := os.MkdirTemp("", "gw")
	must(t, err)
	defer os.RemoveAll(dir)
	g := newGatewayWorld(t)
	cfg := gatewayConfig{socket: filepath.Join(dir, "s"), host: "toad.example.org", upstream: g.upstream.Listener.Addr().String(), secretFile: filepath.Join(dir, "secret")}
	log := slog.New(slog.NewTextHandler(testWriter{t}, nil))
	if err := gateway(t.Context(), cfg, log); err == nil || !strings.Contains(err.Error(), "toad serve makes") {
		t.Errorf("without a secret: %v", err)
	}
	secret, err := gatewaySecret(dir)
	must(t, err)
	if again, err := gatewaySecret(dir); err != nil || again != secret || len(secret) < 26 {
		t.Errorf("secret %q, then %q, %v", secret, again, err)
	}
	must(t, os.Rename(filepath.Join(dir, "run", "gateway", "secret"), cfg.secretFile))
	stale, err := net.Listen("unix", cfg.socket)
	must(t, err)
	stale.(*net.UnixListener).SetUnlinkOnClose(false)
	stale.Close()

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- gateway(ctx, cfg, log) }()
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", cfg.socket)
	}}}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) { // it starts in a goroutine of its own
		res, err := client.Get("http://toad.example.org/")
		if err == nil {
			res.Body.Close()
			if res.StatusCode != 200 || g.requests()[0].Header.Get("Authorization") != "Bearer "+secret {
				t.Errorf("status %d, asked with %v", res.StatusCode, g.requests()[0].Header)
			}
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	if st, err := os.Stat(cfg.socket); err != nil || st.Mode().Perm() != 0o660 {
		t.Errorf("socket: %v, %v", st.Mode(), err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("ended with %v", err)
	}
}

// systemd hears READY=1 of the gateway, and then a sign of life at least each period, whether or not Toad is there.
func TestGatewayWatchdog(t *testing.T) {
	dir, err := os.MkdirTemp("", "gw") // the paths of sockets have to be short
	must(t, err)
	defer os.RemoveAll(dir)
	at := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.WriteFile(at("secret"), []byte("s3cret"), 0o600))
	said, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: at("notify"), Net: "unixgram"})
	must(t, err)
	defer said.Close()
	t.Setenv("NOTIFY_SOCKET", at("notify"))

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	cfg := gatewayConfig{socket: at("s"), host: "toad.example.org", upstream: "127.0.0.1:1", secretFile: at("secret"), watchdog: 2 * time.Second}
	go func() { ended <- gateway(ctx, cfg, slog.New(slog.NewTextHandler(testWriter{t}, nil))) }()
	for i, want := range []string{"READY=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"} {
		if want == "STOPPING=1" {
			stop()
		}
		b := make([]byte, 64)
		must(t, said.SetReadDeadline(time.Now().Add(10*time.Second)))
		begun := time.Now()
		n, err := said.Read(b)
		must(t, err)
		if got := string(b[:n]); got != want || i > 0 && time.Since(begun) > cfg.watchdog {
			t.Errorf("it said %q after %s, want %q within %s", got, time.Since(begun), want, cfg.watchdog)
		}
	}
	must(t, <-ended)
}

// A Toad that is away is told to the journal once a minute, however often it is asked for.
func TestGatewayTellsOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told bytes.Buffer
		h := gatewayHandler(gatewayConfig{host: "toad.example.org", upstream: "127.0.0.1:1"}, "s3cret", slog.New(slog.NewTextHandler(&told, nil)))
		for _, tt := range []struct {
			after time.Duration
			lines int
		}{{0, 1}, {0, 1}, {59 * time.Second, 1}, {time.Second, 2}, {time.Second, 2}} {
			time.Sleep(tt.after)
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, httptest.NewRequest("GET", "http://toad.example.org/", nil))
			if n := strings.Count(told.String(), "level=ERROR"); rec.Code != http.StatusBadGateway || n != tt.lines {
				t.Errorf("%s later: status %d, %d lines, want %d:\n%s", tt.after, rec.Code, n, tt.lines, told.String())
			}
		}
	})
}

func TestPageWantsTheCredential(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		h := guarded("s3cret", w.d.webHandler())
		for _, tt := range []struct {
			name   string
			header []string
			status int
		}{
			{"right", []string{"Bearer s3cret"}, 200},
			{"none", nil, 401},
			{"empty", []string{""}, 401},
			{"wrong", []string{"Bearer s3creT"}, 401},
			{"longer", []string{"Bearer s3cret "}, 401},
			{"shorter", []string{"Bearer s3cre"}, 401},
			{"another scheme", []string{"Basic s3cret"}, 401},
			{"two", []string{"Bearer s3cret", "Bearer s3cret"}, 401},
		} {
			for _, path := range []string{"/", "/services/hello", "/index.json", webNames["page.css"]} {
				r := httptest.NewRequest("GET", path, nil)
				r.Header["Authorization"] = tt.header
				rec := httptest.NewRecorder()
				h.ServeHTTP(rec, r)
				if rec.Code != tt.status || tt.status == 401 && rec.Body.Len() > 0 {
					t.Errorf("%s, %s: status %d with %d bytes", tt.name, path, rec.Code, rec.Body.Len())
				}
			}
		}
	})
}

func TestPrivatePeers(t *testing.T) {
	addr := netip.MustParseAddr
	nets := []subnet{{netip.MustParsePrefix("10.89.5.0/24"), addr("10.89.5.1")}, {netip.MustParsePrefix("fd00:5::/64"), addr("fd00:5::1")}}
	for peer, want := range map[string]bool{
		"10.89.5.3": true, "10.89.5.254": true, "::ffff:10.89.5.3": true, "fd00:5::3": true,
		"10.89.5.1": false, "::ffff:10.89.5.1": false, "fd00:5::1": false, "10.89.6.3": false, "127.0.0.1": false, "::1": false, "fd00:6::3": false, "192.0.2.1": false,
	} {
		if got := isInside(net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr(peer), 5000)), nets); got != want {
			t.Errorf("%s is inside: %v", peer, got)
		}
		if isInside(net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr(peer), 5000)), nil) {
			t.Errorf("%s is inside a network that is not known", peer)
		}
	}
	if isInside(&net.UnixAddr{Name: "x", Net: "unix"}, nets) {
		t.Error("a peer without an address is inside")
	}
	open := []subnet{{prefix: netip.MustParsePrefix("10.0.0.0/8")}}
	if !isInside(net.TCPAddrFromAddrPort(netip.MustParseAddrPort("10.1.2.3:1")), open) {
		t.Error("a network without a gateway lets nobody in")
	}

	// Whoever is outside gets no byte, and no later one waits for that.
	local := netip.MustParsePrefix("127.0.0.0/8")
	for _, tt := range []struct {
		name    string
		subnets []subnet
		answers bool
	}{
		{"not known", nil, false}, {"from the gateway's address", []subnet{{local, addr("127.0.0.1")}}, false}, {"inside", []subnet{{local, addr("127.0.0.9")}}, true},
	} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {})}
		go srv.Serve(&privatePeers{Listener: ln, subnets: func() []subnet { return tt.subnets }, log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		for range 2 {
			c, err := net.Dial("tcp", ln.Addr().String())
			must(t, err)
			fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
			line, err := bufio.NewReader(c).ReadString('\n')
			if (err == nil) != tt.answers || !tt.answers && line != "" {
				t.Errorf("%s: %q, %v", tt.name, line, err)
			}
			c.Close()
		}
		srv.Close()
	}
}
