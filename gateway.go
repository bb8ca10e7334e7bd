// gateway.go is `toad gateway`: the page's way out. It listens on a Unix socket that the public web server
// shares, for one host name and for reading only, and asks Toad's web listener over the private network
// with a credential that no client's request can carry there.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// gatewayConfig is where the gateway stands and what it leads to.
type gatewayConfig struct {
	socket     string // that it listens on
	host       string // the one name it answers to
	upstream   string // host:port of Toad's web listener
	secretFile string // the credential, which Toad made

	watchdog time.Duration // a third of it apart systemd is told that the gateway lives; 0: never
}

// How large a page may be, and how long it may take.
const (
	maxPage     = 8 << 20
	pageTimeout = 15 * time.Second
)

// gateway serves until ctx ends, which is a clean end.
func gateway(ctx context.Context, cfg gatewayConfig, log *slog.Logger) error {
	secret, err := os.ReadFile(cfg.secretFile)
	if err != nil {
		return fmt.Errorf("reading the gateway's secret, which toad serve makes: %w", err)
	}
	ln, err := bindSocket(cfg.socket, 0o660)
	if err != nil {
		return err
	}
	srv := webServer(gatewayHandler(cfg, string(secret), log), log)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	notify("READY=1")
	log.Info("serving", "socket", cfg.socket, "host", cfg.host, "upstream", cfg.upstream)
	alive := signsOfLife(cfg.watchdog) // as in serve: this loop waits for nobody
	for end := false; !end; {
		select {
		case err := <-served:
			return fmt.Errorf("serving %s: %w", cfg.socket, err)
		case <-ctx.Done():
			end = true
		case <-alive:
			notify("WATCHDOG=1")
		}
	}
	notify("STOPPING=1")
	sctx, stop := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer stop()
	_ = srv.Shutdown(sctx)
	return nil
}

// webServer is a server that a slow or talkative client cannot hold up.
func webServer(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 2 * pageTimeout, IdleTimeout: time.Minute,
		MaxHeaderBytes: 16 << 10, DisableGeneralOptionsHandler: true, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
}

// gatewayHandler answers what may be asked, and passes on nothing that the client said but the path and
// which form it takes.
func gatewayHandler(cfg gatewayConfig, secret string, log *slog.Logger) http.Handler {
	var told minutely
	proxy := &httputil.ReverseProxy{
		Transport: &http.Transport{
			DialContext:           (&net.Dialer{Timeout: 3 * time.Second}).DialContext,
			ResponseHeaderTimeout: 10 * time.Second, MaxResponseHeaderBytes: 32 << 10, MaxConnsPerHost: 16, IdleConnTimeout: 30 * time.Second, DisableCompression: true,
		},
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.URL.RawQuery, r.Out.Host = "http", cfg.upstream, "", cfg.host
			r.Out.Header = http.Header{"Authorization": {"Bearer " + secret}, "User-Agent": {"toad-gateway"}}
		},
		ModifyResponse: func(res *http.Response) error {
			if res.StatusCode != http.StatusOK && res.StatusCode != http.StatusNotFound {
				return fmt.Errorf("toad answered %s", res.Status)
			}
			b, err := io.ReadAll(io.LimitReader(res.Body, maxPage+1))
			if err != nil {
				return fmt.Errorf("reading toad's answer: %w", err)
			}
			if len(b) > maxPage {
				return fmt.Errorf("toad's answer is larger than %d bytes", maxPage)
			}
			res.Body.Close()
			res.Body = io.NopCloser(bytes.NewReader(b))
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if !errors.Is(err, context.Canceled) && told.now() {
				log.Error("asking toad", "path", r.URL.Path, "err", err)
			}
			writePage(w, log, http.StatusBadGateway, "error", errorPage{"Toad does not answer", "It may be starting again. What it deployed runs on without it."})
		},
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !strings.EqualFold(r.Host, cfg.host):
			w.WriteHeader(http.StatusMisdirectedRequest)
		case !readOnly(w, r, log):
		case r.ContentLength != 0:
			w.Header().Set("Connection", "close")
			writePage(w, log, http.StatusBadRequest, "error", errorPage{"That was too much", "A request for a page has no body."})
		case serveAsset(w, r): // here, so that a page without Toad has its looks
		default:
			ctx, cancel := context.WithTimeout(r.Context(), pageTimeout)
			defer cancel()
			proxy.ServeHTTP(w, r.WithContext(ctx))
		}
	})
}

// gatewaySecret is the credential in DATA/run/gateway, made at the first start. That directory alone is
// mounted into the gateway's container.
func gatewaySecret(data string) (string, error) {
	path := filepath.Join(data, "run", "gateway", "secret")
	b, err := os.ReadFile(path)
	if err == nil && len(b) < 26 {
		return "", fmt.Errorf("reading %s: it is too short: remove it, and start Toad and its gateway again", path)
	}
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return "", fmt.Errorf("making the gateway's secret: %w", err)
		}
		b = []byte(rand.Text())
		err = writeFile(path, b)
	}
	if err != nil {
		return "", fmt.Errorf("reading the gateway's secret: %w", err)
	}
	return string(b), nil
}

// guarded lets the holder of the credential in. To anyone else nothing is said.
func guarded(secret string, next http.Handler) http.Handler {
	want := sha256.Sum256([]byte("Bearer " + secret))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := sha256.Sum256([]byte(strings.Join(r.Header.Values("Authorization"), ",")))
		if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			w.Header().Set("Connection", "close")
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// privatePeers closes, before a byte, every connection from outside the private network. What was sent
// across bridges comes from that network's own gateway address, and is closed as well. As long as the
// network is not known everyone is outside.
type privatePeers struct {
	net.Listener
	subnets func() []subnet
	log     *slog.Logger
	told    minutely
}

func (l *privatePeers) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil || isInside(c.RemoteAddr(), l.subnets()) {
			return c, err
		}
		c.Close()
		if l.told.now() {
			l.log.Warn("connection to the page closed", "peer", c.RemoteAddr().String())
		}
	}
}

// minutely lets something be told at most once a minute: whoever can connect must not fill the journal.
type minutely struct {
	mu   sync.Mutex
	last time.Time
}

func (m *minutely) now() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if time.Since(m.last) < time.Minute {
		return false
	}
	m.last = time.Now()
	return true
}

func isInside(peer net.Addr, subnets []subnet) bool {
	tcp, ok := peer.(*net.TCPAddr)
	if !ok {
		return false
	}
	addr := tcp.AddrPort().Addr().Unmap()
	for _, n := range subnets {
		if n.prefix.Contains(addr) {
			return addr != n.gateway
		}
	}
	return false
}

// subnet is a network that a container is on, with its gateway's address in it.
type subnet struct {
	prefix  netip.Prefix
	gateway netip.Addr
}
