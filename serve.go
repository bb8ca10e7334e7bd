// serve.go is the life of the server: it opens the data directory, starts every service, serves the
// administration socket, and ends in order.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// daemon is the running server.
type daemon struct {
	data        *dataDir
	host        *host
	enrollments *enrollments
	log         *slog.Logger
	stopping    chan struct{} // closed when the server is to end: waiting requests are answered

	ctx context.Context // of every service's run
	wg  sync.WaitGroup  // the runs

	adding   sync.Mutex // held while a new service's records are read first
	mu       sync.Mutex // guards services; never held across a reading of the disk
	services map[string]*service

	tokens tokenIndex
	conns  chan struct{} // a token in it for each connection over TCP
}

// all returns the services sorted by name.
func (d *daemon) all() []*service {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.SortedFunc(maps.Values(d.services), func(a, b *service) int { return strings.Compare(a.name, b.name) })
}

// service finds a service by name, one that was enrolled a moment ago included.
func (d *daemon) service(name string) (*service, error) {
	if serviceID.MatchString(name) {
		s := d.known(name)
		if s == nil { // the directory is read for a name that is not known
			d.refresh()
			s = d.known(name)
		}
		if s != nil {
			return s, nil
		}
	}
	return nil, refuse("not_found", "there is no such service")
}

func (d *daemon) known(name string) *service {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.services[name]
}

// lookInterval is how far what is told of an enrollment may be behind its files. An admission reads them anew.
const lookInterval = 250 * time.Millisecond

// lookUntil looks at the enrollments until ctx ends, so that nobody who only reads waits for a disk.
func (d *daemon) lookUntil(ctx context.Context) {
	tick := time.NewTicker(lookInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			d.refresh()
		}
	}
}

// refresh takes up services that were enrolled since, and tells each what its enrollment is. One that has
// state is never forgotten.
func (d *daemon) refresh() {
	var known []string
	for _, s := range d.all() {
		known = append(known, s.name)
	}
	for name, en := range d.enrollments.all(known...) {
		if s := d.add(name); s != nil {
			s.enrolledAs(en, en.Err)
		}
	}
}

// add starts a service unless it is there, and returns it; nil for what is no service's name. It begins by
// reading its records.
func (d *daemon) add(name string) *service {
	if !serviceID.MatchString(name) {
		return nil
	}
	d.adding.Lock()
	defer d.adding.Unlock()
	if s := d.known(name); s != nil || d.ctx.Err() != nil {
		return s
	}
	s := newService(name, d.data, d.host, func() (enrolled, error) { return d.enrollments.get(name) }, d.log)
	s.index = &d.tokens
	if err := s.open(); err != nil { // at once, so that a new service is usable when it is first seen; run says what is wrong
		s.setUnavailable(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.services[name] = s
	d.wg.Go(func() { s.run(d.ctx) })
	return s
}

// claims are the unit and container names of services that have a revision: nobody else may enroll them.
func (d *daemon) claims() map[string]claim {
	claims := map[string]claim{}
	for _, s := range d.all() {
		if c, ok := s.claim(); ok {
			claims[s.name] = c
		}
	}
	return claims
}

// busPatience is how long the bus may refuse connections before Toad ends: its mount is stale then, and
// its own restart mounts the new socket. A call that times out is no reason to end.
const busPatience = 30 * time.Second

// ownUnit is the unit that runs Toad itself.
const ownUnit = "toad.service"

// watchManager looks at Toad's own unit and at the bus until the bus has refused connections for long, which
// is its error, or ctx ends. A manager that hangs holds up this alone.
func (d *daemon) watchManager(ctx context.Context, sd *systemd) error {
	var gone time.Time
	lost := false
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		// A file that the generator cannot load takes Toad's own unit with it: told, and nothing more.
		if st, err := sd.Unit(ctx, ownUnit); err == nil && (st.LoadState == "not-found") != lost {
			if lost = !lost; lost {
				d.log.Error("unit-lost", "unit", ownUnit)
				if err := d.data.ownEvent("unit-lost", ownUnit+" is not loaded any more: a file beside it cannot be read, or it is gone"); err != nil {
					d.log.Error("writing toad's own event", "err", err)
				}
			}
		}
		if _, err := sd.Incarnation(ctx); !errors.Is(err, errBusGone) {
			gone = time.Time{}
		} else if gone.IsZero() {
			gone = time.Now()
		} else if time.Since(gone) > busPatience {
			return fmt.Errorf("the user bus has refused connections for %s: %w", busPatience, err)
		}
	}
}

// serve runs the server until ctx ends, which is a clean end, or until it cannot go on.
func serve(ctx context.Context, cfg serveConfig, log *slog.Logger) error {
	data, err := openData(cfg.data, cfg.quadlets)
	if err != nil {
		return err
	}
	defer data.close()

	sd, pod := newSystemd(cfg.bus), newPodman(cfg.podman)
	own := &self{podman: pod}
	reg := &registry{authFile: cfg.authFile, caFile: cfg.caFile, plainHTTP: cfg.plainHTTP}
	roots, err := reg.roots()
	if err != nil { // the registry asks again; a service that is asked over https is not ready without
		log.Error("reading the certificates that readiness over https is trusted by", "err", err)
	}
	rctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	d := &daemon{data: data, log: log, stopping: make(chan struct{}), ctx: rctx, services: map[string]*service{}}
	defer func() { // nothing is written once the directory is another's
		cancel()
		d.wg.Wait()
	}()
	d.host = &host{
		units: sd, containers: pod, wall: time.Now, boot: bootTime, bootID: kernelBootID, probe: httpProbe(roots), quadlets: cfg.quadlets,
		fetch: func(ctx context.Context, dir, image string, limit byteSize) (imageInfo, error) {
			return reg.fetch(ctx, dir, image, limit, "linux/"+runtime.GOARCH, reserveSize)
		},
		inspect: func(ctx context.Context, dir, image string, limit byteSize) error {
			return reg.inspect(ctx, dir, image, limit, "linux/"+runtime.GOARCH)
		},
		hostPaths: func(ctx context.Context) (string, string, error) { return own.paths(ctx, cfg.data, cfg.quadlets) },
	}
	d.enrollments = newEnrollments(cfg.enrollment, func() enrollOptions {
		o := enrollOptions{quadlets: cfg.quadlets, reserved: cfg.reserved, claims: d.claims()}
		if p := own.known(cfg.data); p != "" {
			// Whoever writes one of the other two could have Toad run anything.
			o.forbiddenPaths = []string{p, own.known(cfg.quadlets), own.known(cfg.enrollment)}
		}
		return o
	})
	names, err := data.services()
	if err != nil {
		return err
	}
	for _, name := range names {
		d.add(name)
	}
	d.refresh()

	served := make(chan error, 2)
	var servers []*http.Server
	start := func(ln net.Listener, h http.Handler) {
		srv := newServer(h, log)
		servers = append(servers, srv)
		go func() { served <- fmt.Errorf("serving %s: %w", ln.Addr(), srv.Serve(ln)) }()
	}
	ln, err := listenUnix(filepath.Join(cfg.data, "run", "toad.sock"))
	if err != nil {
		return err
	}
	start(ln, d.handler())
	if cfg.listen != "" {
		tcp, err := net.Listen("tcp", cfg.listen)
		if err != nil {
			return fmt.Errorf("listening for holders of tokens: %w", err)
		}
		d.conns = make(chan struct{}, maxConns)
		start(&ownPeers{Listener: tcp, log: log, own: net.InterfaceAddrs, slots: d.conns}, d.tcpHandler())
	}
	if cfg.webListen != "" {
		page := webServer(nil, log)
		if err := d.servePage(page, cfg, own); err != nil { // nothing that is deployed depends on it
			log.Error("the page is not served", "err", err)
		}
		servers = append(servers, page)
	}
	if err := data.ownEvent("start", buildVersion().Version); err != nil {
		log.Error("writing toad's own event", "err", err)
	}
	notify("READY=1")
	log.Info("serving", "socket", ln.Addr().String(), "listen", cfg.listen, "services", len(d.all()))

	d.wg.Go(func() { data.own.tally.run(rctx, func() error { return data.own.write() }) })
	d.wg.Go(func() { d.saveUsesUntil(rctx) })
	d.wg.Go(func() { d.lookUntil(rctx) })
	go func() {
		for own.ask(rctx) != nil && rctx.Err() == nil { // a Podman that does not answer holds up nothing
			time.Sleep(time.Second)
		}
	}()
	watched := make(chan error, 1)
	d.wg.Go(func() { watched <- d.watchManager(rctx, sd) })
	// This loop calls nothing of the host's: one that hangs does not keep it from saying that Toad lives.
	alive := signsOfLife(cfg.watchdog)
	for end := false; !end; {
		select {
		case <-ctx.Done():
			end = true
		case err = <-served:
			end = true
		case err = <-watched:
			end = true
		case <-alive:
			notify("WATCHDOG=1")
		}
	}

	d.stop(ctx, servers, cancel)
	return err
}

// stop ends the server in order: no new operation is taken, who waits is answered, and an operation under way
// stays as it is on disk. cancel ends what runs in d.ctx.
func (d *daemon) stop(ctx context.Context, servers []*http.Server, cancel func()) {
	notify("STOPPING=1")
	for _, s := range d.all() {
		s.live.Lock()
		s.live.closing = true
		s.live.Unlock()
	}
	close(d.stopping)
	ctx, end := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer end()
	for _, srv := range servers {
		if srv.Shutdown(ctx) != nil {
			_ = srv.Close() // nothing is answered from records that the next one may write
		}
	}
	cancel()
	d.wg.Wait()
	for _, s := range d.all() {
		if err := s.tally.end(s.commitCounted); err != nil {
			d.log.Error("writing counted events", "service", s.name, "err", err)
		}
	}
	if err := d.data.own.tally.end(func() error { return d.data.own.write() }); err != nil {
		d.log.Error("writing toad's own counted events", "err", err)
	}
	if err := d.data.ownEvent("stop", ""); err != nil {
		d.log.Error("writing toad's own event", "err", err)
	}
}

// servePage begins to serve the page, to the gateway alone.
func (d *daemon) servePage(srv *http.Server, cfg serveConfig, own *self) error {
	secret, err := gatewaySecret(cfg.data)
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", cfg.webListen)
	if err != nil {
		return fmt.Errorf("listening for the gateway: %w", err)
	}
	srv.Handler = guarded(secret, d.webHandler())
	go func() {
		if err := srv.Serve(&privatePeers{Listener: ln, subnets: own.private, log: d.log}); !errors.Is(err, http.ErrServerClosed) {
			d.log.Error("the page is not served any more", "err", err)
		}
	}()
	return nil
}

// listenUnix listens on the administration socket: its directory is for the owner alone, and so is it.
// Whatever socket lies there is stale, because the lock on the data directory is held.
func listenUnix(path string) (net.Listener, error) {
	if err := os.Chmod(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("closing the socket's directory to others: %w; it must belong to the user that runs Toad", err)
	}
	return bindSocket(path, 0o600)
}

// bindSocket listens on a socket of that mode, in place of the one that its predecessor left.
func bindSocket(path string, mode fs.FileMode) (net.Listener, error) {
	if st, err := os.Lstat(path); err == nil && st.Mode()&fs.ModeSocket == 0 {
		return nil, fmt.Errorf("listening on %s: a file that is no socket is in the way", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("removing the old socket: %w", err)
	}
	ln, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", path, err)
	}
	if err := os.Chmod(path, mode); err != nil {
		ln.Close()
		return nil, fmt.Errorf("closing the socket to others: %w", err)
	}
	return ln, nil
}

// newServer is a server that no client can hold up: headers have their time and size, and the handler
// bounds body and answer.
func newServer(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
		DisableGeneralOptionsHandler: true, // it would answer anyone
		ErrorLog:                     slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
}

// maxConns bounds the connections over TCP.
const maxConns = 2048

// ownPeers closes, before a byte, every connection whose peer has not one of this network namespace's own
// addresses: one through the published port has, one from another container has not. So it does with
// those above the bound.
type ownPeers struct {
	net.Listener
	log   *slog.Logger
	own   func() ([]net.Addr, error) // asked each time: a network may have been joined
	slots chan struct{}
	told  minutely
}

func (l *ownPeers) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		why := "too many connections"
		if !l.isOwn(c.RemoteAddr()) {
			why = "not an own address"
		} else {
			select {
			case l.slots <- struct{}{}:
				return &countedConn{Conn: c, leave: sync.OnceFunc(func() { <-l.slots })}, nil
			default:
			}
		}
		c.Close()
		if l.told.now() {
			l.log.Warn("connection closed", "peer", c.RemoteAddr().String(), "because", why)
		}
	}
}

func (l *ownPeers) isOwn(peer net.Addr) bool {
	p, ok := peer.(*net.TCPAddr)
	addrs, err := l.own()
	if err != nil {
		l.log.Error("reading the own addresses", "err", err)
	}
	return ok && slices.ContainsFunc(addrs, func(a net.Addr) bool {
		n, ok := a.(*net.IPNet)
		return ok && n.IP.Equal(p.IP)
	})
}

// countedConn gives its place back when it is closed.
type countedConn struct {
	net.Conn
	leave func()
}

func (c *countedConn) Close() error {
	c.leave()
	return c.Conn.Close()
}

// notify tells systemd, which a unit with Notify=true passes the socket of (sd_notify(3)).
func notify(what string) {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return
	}
	if c, err := net.Dial("unixgram", path); err == nil {
		defer c.Close()
		_, _ = c.Write([]byte(what))
	}
}

// signsOfLife is when systemd is to hear one, a third of its watchdog's period apart; never for 0.
func signsOfLife(period time.Duration) <-chan time.Time {
	if period <= 0 {
		return nil
	}
	return time.Tick(period / 3)
}

// bootTime is CLOCK_BOOTTIME (clock_gettime(2)): it goes on while the host sleeps.
func bootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(err) // Linux has had it since 2.6.39
	}
	return time.Duration(ts.Nano())
}

// kernelBootID is random for each boot of the kernel (random(4)).
var kernelBootID = sync.OnceValue(func() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		panic(err)
	}
	return strings.TrimSpace(string(b))
})

// self is what Toad knows of its own container, from Podman's inspection of it: the host's names of its
// mounts, and the private network's addresses. A process outside of any container has the host's own
// names, and no private network.
type self struct {
	podman *podman
	asking sync.Mutex // one inspection at a time

	mu      sync.Mutex // never held across a call to Podman
	mounts  map[string]string
	subnets []subnet
	asked   bool
}

// privateNetwork is the network that Toad shares with its gateway alone.
const privateNetwork = "toad"

// ask inspects once; a failure is not remembered.
func (s *self) ask(ctx context.Context) error {
	s.asking.Lock()
	defer s.asking.Unlock()
	s.mu.Lock()
	asked := s.asked
	s.mu.Unlock()
	if asked {
		return nil
	}
	name, err := os.Hostname() // the first 12 digits of the container's id, unless HostName= is set
	if err != nil {
		return err
	}
	mounts, err := s.podman.Self(ctx, name)
	if err != nil && !errors.Is(err, errNotFound) {
		return err
	}
	subnets, err := s.podman.Subnets(ctx, name, privateNetwork)
	if err != nil && !errors.Is(err, errNotFound) {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mounts, s.subnets, s.asked = mounts, subnets, true
	return nil
}

// private is the private network, as far as it is known.
func (s *self) private() []subnet {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.subnets
}

// paths is how the host names two directories of Toad's.
func (s *self) paths(ctx context.Context, data, quadlets string) (string, string, error) {
	if err := s.ask(ctx); err != nil {
		return "", "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	outside := func(p string) string {
		if h, ok := s.mounts[p]; ok {
			return h
		}
		return p
	}
	return outside(data), outside(quadlets), nil
}

// known is how the host names a directory, without asking; "" when that is not known.
func (s *self) known(path string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mounts[path]
}
