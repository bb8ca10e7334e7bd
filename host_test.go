package main

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// fakeHost is the in-memory host behind rollout.go's two interfaces: one small coherent world that
// behaves as the real systemd and Podman were measured to. A stopped unit that nobody holds is
// unloaded and forgets its invocation; a reload says success for a broken file; a job ends while an
// unkillable process lives; a changed file starts at the next crash; a manual start sets NRestarts to
// zero. It polices the singleton itself: two running containers of one service fail the test.
type fakeHost struct {
	t testing.TB

	mu         sync.Mutex
	quadlets   string
	data       string
	units      map[string]*hostUnit
	containers map[string]*hostContainer
	images     map[string]string // in Podman: reference → image id
	starts     []fakeStart       // Podman's own start events
	journal    []fakeLine
	networks   map[string]bool
	apps       map[string]*app // image digest → how it behaves
	registry   map[string]fakeImage
	booted     int
	incarn     int
	kernelBoot string
	wallOffset time.Duration
	serial     int
	taken      int // starts by hand that systemd took

	signals signalling
	ran     map[string]int // starts of units, by toad.operation, made or refused

	hung         bool // a test's own mark
	loadsRefused int  // connections for a load that nobody takes
	loadHangs    bool // Podman takes the archive and never answers
	registryDown bool
	podmanHangs  bool
	managerHangs bool
	journalHangs bool
	generator    func(unit string, text []byte) bool // false: refuses
	analyze      bool
	badFlags     bool // podman refuses the command's flags

	// onFetch may fail a fetch from the registry.
	onFetch func(ctx context.Context, image string) error
	// mutate is called before each mutation with its name. It may answer that the mutation is not to be
	// applied, and with which error.
	mutate func(name string) (apply bool, err error)
	// mutations is every mutation that was asked for, in order.
	mutations []string
}

// signalling is how systemd's signals come: at once, late, or not at all. What is late still comes before
// a later answer of systemd's, as on one connection.
type signalling int

const (
	signalsAtOnce signalling = iota
	signalsLate
	signalsLost
)

const signalDelay = 2 * time.Second

type app struct {
	slow         time.Duration // it answers so late, as it is then
	readyAfter   time.Duration // negative: never
	readyFor     time.Duration // then unready for ever; 0: no end
	exitAfter    time.Duration // 0: runs on
	exitOnce     bool          // only the first start of it exits
	ignoresTerm  bool          // killed by SIGKILL after StopTimeout: the unit ends failed
	unkillable   bool          // nothing ends it
	restartAfter time.Duration // default 100 ms
	noLimit      bool          // StartLimitIntervalSec=0
	noRestart    bool          // Restart=no
	exits        int
	says         string // written at each start
}

type fakeImage struct {
	id       string // config digest
	manifest []byte
	config   []byte
}

type hostUnit struct {
	name   string
	text   string // as loaded; "" not-found
	source string
	active, sub,
	result string
	job        uint32
	invocation string
	nrestarts  uint32
	mainPID    uint32
	container  *hostContainer
	lingering  []string // processes nobody can kill
	begun      time.Time
	starts     []time.Time
	holds      int
	signals    []*unitSignals
	late       []lateSignal
	gen        int // cancels timers of an earlier life
	dependents []string
	exits      int
}

type lateSignal struct {
	due    time.Time
	to     []*unitSignals
	status unitStatus
}

type hostContainer struct {
	container
	app   *app
	begun time.Time
}

type fakeStart struct {
	name, operation string
	at              time.Time
}

// fakeLine is one line of the journal that a container wrote.
type fakeLine struct {
	at              time.Time
	unit, container string
	text            string
}

func newFakeHost(t testing.TB) *fakeHost {
	h := &fakeHost{t: t, quadlets: filepath.Join(t.TempDir(), "quadlets"), units: map[string]*hostUnit{}, containers: map[string]*hostContainer{}, images: map[string]string{}, ran: map[string]int{},
		networks: map[string]bool{"systemd-apps": true}, apps: map[string]*app{}, registry: map[string]fakeImage{}, kernelBoot: "boot-1", incarn: 1, analyze: true}
	must(t, os.MkdirAll(h.quadlets, 0o700))
	must(t, os.WriteFile(filepath.Join(h.quadlets, "apps.network"), []byte("[Network]\n"), 0o600))
	return h
}

// push makes an image of that behaviour and returns its reference.
func (h *fakeHost) push(repository, name string, a app) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	config := []byte(fmt.Sprintf(`{"architecture":"amd64","os":"linux","config":{"Env":["NAME=%s"]},"rootfs":{"type":"layers","diff_ids":[]}}`, name))
	id := sha(config)
	manifest := []byte(fmt.Sprintf(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"%s","size":%d},"layers":[]}`, id, len(config)))
	digest := sha(manifest)
	h.registry[digest] = fakeImage{id: id, manifest: manifest, config: config}
	h.apps[digest] = &a
	return repository + "@" + digest
}

func sha(b []byte) string {
	s := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(s[:])
}

// fetch is the image fetch: what the layout lacks comes from the registry, if it answers.
func (h *fakeHost) fetch(ctx context.Context, dir, image string, limit byteSize) (imageInfo, error) {
	digest := digestOf(image)
	if info, err := checkLayout(dir, digest); err == nil {
		return info, nil
	}
	h.mu.Lock()
	onFetch := h.onFetch
	h.mu.Unlock()
	if onFetch != nil {
		if err := onFetch(ctx, image); err != nil {
			return imageInfo{}, err
		}
	}
	h.mu.Lock()
	img, ok := h.registry[digest]
	h.mu.Unlock()
	select {
	case <-time.After(200 * time.Millisecond):
	case <-ctx.Done():
		return imageInfo{}, failed("fetch_failed", ctx.Err(), digest)
	}
	h.mu.Lock()
	down := h.registryDown
	h.mu.Unlock()
	if down || !ok {
		return imageInfo{}, failed("fetch_failed", errors.New("registry is down"), digest)
	}
	blobs := filepath.Join(dir, "blobs", "sha256")
	if err := makeDir(blobs); err != nil {
		return imageInfo{}, err
	}
	for _, b := range [][]byte{img.config, img.manifest} {
		if err := writeFile(filepath.Join(blobs, strings.TrimPrefix(sha(b), "sha256:")), b); err != nil {
			return imageInfo{}, err
		}
	}
	return checkLayout(dir, digest)
}

// inspect is the look at an image that is not fetched.
func (h *fakeHost) inspect(ctx context.Context, dir, image string, limit byteSize) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.registry[digestOf(image)]; h.registryDown || !ok {
		return failed("fetch_failed", errors.New(canary+": registry is down"), digestOf(image), "no connection, or it broke off")
	}
	return nil
}

// step is the gate of every mutation.
func (h *fakeHost) step(name string) (apply bool, err error) {
	h.mu.Lock()
	h.mutations = append(h.mutations, name)
	m := h.mutate
	h.mu.Unlock()
	if m == nil {
		return true, nil
	}
	return m(name)
}

func (h *fakeHost) is(flag *bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return *flag
}

// ask is the gate of every call to the manager: it hangs while the manager does.
func (h *fakeHost) ask(ctx context.Context, hangs *bool) error {
	if h.is(hangs) {
		select {
		case <-time.After(10 * time.Second):
			return errors.New(canary + ": no answer within 10s")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return ctx.Err()
}

func (h *fakeHost) unit(name string) *hostUnit {
	u := h.units[name]
	if u == nil {
		u = &hostUnit{name: name, active: "inactive", sub: "dead", result: "success"}
		h.units[name] = u
	}
	return u
}

func (h *fakeHost) Unit(ctx context.Context, name string) (unitStatus, error) {
	if err := h.ask(ctx, &h.managerHangs); err != nil {
		return unitStatus{}, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	u := h.unit(name)
	u.deliver(time.Time{})
	return u.status(h), nil
}

func (u *hostUnit) status(h *fakeHost) unitStatus {
	st := unitStatus{LoadState: "loaded", ActiveState: u.active, SubState: u.sub, Result: u.result, Job: u.job, InvocationID: u.invocation, NRestarts: u.nrestarts, MainPID: u.mainPID,
		SourcePath: u.source, FragmentPath: "/run/user/1001/systemd/generator/" + u.name, Dependents: slices.Clone(u.dependents)}
	if u.container != nil || len(u.lingering) > 0 {
		st.ControlGroup = "/user.slice/" + u.name
	}
	if u.text == "" {
		st.LoadState, st.SourcePath, st.FragmentPath = "not-found", "", ""
		return st
	}
	st.ExecStart = []string{"/usr/bin/podman", "run", "--name", containerNameOf(u.text, u.name), "-d", lineOf(u.text, "Image=")}
	if b, err := os.ReadFile(u.source); err != nil || string(b) != u.text {
		st.NeedDaemonReload = true
	}
	return st
}

func lineOf(text, key string) string {
	var v string
	for line := range strings.Lines(text) {
		if s, ok := strings.CutPrefix(strings.TrimSpace(line), key); ok {
			v = s
		}
	}
	return v
}

func labelsOf(text string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(text) {
		if s, ok := strings.CutPrefix(strings.TrimSpace(line), "Label="); ok {
			k, v, _ := strings.Cut(s, "=")
			m[k] = v
		}
	}
	return m
}

func containerNameOf(text, unit string) string {
	if n := lineOf(text, "ContainerName="); n != "" {
		return n
	}
	return "systemd-" + strings.TrimSuffix(unit, ".service")
}

func (h *fakeHost) Processes(ctx context.Context, name string) ([]string, error) {
	if err := h.ask(ctx, &h.managerHangs); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	u := h.unit(name)
	p := slices.Clone(u.lingering)
	if u.container != nil {
		p = append(p, "7 conmon", "8 app")
	}
	return p, nil
}

func (h *fakeHost) Hold(ctx context.Context, name string) (*unitSignals, func(), error) {
	if err := h.ask(ctx, &h.managerHangs); err != nil {
		return nil, nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	u, s := h.unit(name), newUnitSignals()
	u.holds++
	u.signals = append(u.signals, s)
	return s, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		u.holds--
		u.signals = slices.DeleteFunc(u.signals, func(o *unitSignals) bool { return o == s })
		h.collect(u)
	}, nil
}

// collect unloads a unit that has stopped and is not held.
func (h *fakeHost) collect(u *hostUnit) {
	if u.holds == 0 && u.active == "inactive" && u.job == 0 {
		u.invocation, u.nrestarts, u.result = "", 0, "success"
	}
}

func (h *fakeHost) set(u *hostUnit, active, sub string) {
	u.active, u.sub = active, sub
	if h.signals == signalsLost {
		return
	}
	u.late = append(u.late, lateSignal{time.Now().Add(signalDelay), slices.Clone(u.signals),
		unitStatus{ActiveState: active, SubState: sub, InvocationID: u.invocation, NRestarts: u.nrestarts, MainPID: u.mainPID}})
	if h.signals == signalsAtOnce {
		u.deliver(time.Time{})
		return
	}
	time.AfterFunc(signalDelay, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		u.deliver(time.Now())
	})
}

// deliver puts what is late and due by then, in order; all of it for the zero time.
func (u *hostUnit) deliver(by time.Time) {
	for len(u.late) > 0 && (by.IsZero() || !u.late[0].due.After(by)) {
		for _, s := range u.late[0].to {
			s.put(u.late[0].status)
		}
		u.late = u.late[1:]
	}
}

// later runs f after d unless the unit's life went another way before.
func (h *fakeHost) later(u *hostUnit, d time.Duration, f func()) {
	u.gen++
	gen, boot := u.gen, h.booted
	time.AfterFunc(d, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if u.gen == gen && h.booted == boot {
			f()
		}
	})
}

func (h *fakeHost) Start(ctx context.Context, name string) error {
	if err := h.ask(ctx, &h.managerHangs); err != nil {
		return err
	}
	apply, err := h.step("start " + name)
	if apply {
		if e := h.start(name); e != nil {
			return e
		}
	}
	return err
}

// start is StartUnit by hand: NRestarts begins anew.
func (h *fakeHost) start(name string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	u := h.unit(name)
	if u.text == "" {
		return fmt.Errorf("starting %s: %w", name, errNotFound)
	}
	if u.active == "active" || u.active == "activating" && u.sub == "start" {
		return nil
	}
	u.nrestarts = 0
	u.job = uint32(h.next())
	h.taken++
	h.run(u)
	return nil
}

func (h *fakeHost) next() int { h.serial++; return h.serial }

// run begins one invocation of a unit.
func (h *fakeHost) run(u *hostUnit) {
	now := time.Now()
	h.ran[labelsOf(u.text)["toad.operation"]]++
	u.starts = append(u.starts, now)
	recent := 0
	for _, t := range u.starts {
		if now.Sub(t) < 10*time.Second {
			recent++
		}
	}
	image := lineOf(u.text, "Image=")
	a := h.apps[digestOf(image)]
	if recent > 5 && (a == nil || !a.noLimit) {
		u.gen++
		u.job, u.result = 0, "start-limit-hit"
		h.set(u, "failed", "failed")
		return
	}
	u.invocation = fmt.Sprintf("%032x", h.next())
	u.result = "success"
	h.set(u, "activating", "start")
	h.later(u, 300*time.Millisecond, func() {
		_, ok := h.images[image]
		if !ok || a == nil { // Pull=missing: it is tried, for three seconds, and fails with the registry gone
			if !h.registryDown && a != nil {
				h.images[image] = h.registry[digestOf(image)].id
			} else {
				h.later(u, 3*time.Second, func() { h.ended(u, "exit-code") })
				return
			}
		}
		id := h.images[image]
		name := containerNameOf(u.text, u.name)
		h.removeNamed(name) // --replace
		c := &hostContainer{app: a, begun: time.Now(), container: container{
			ID: fmt.Sprintf("%064x", h.next()), Name: name, Status: "running", ConmonPID: uint32(h.next()), ImageName: image, ImageID: id, Unit: u.name,
			Labels: labelsOf(u.text), StartedAt: time.Now().Add(h.wallOffset), Addresses: map[string]string{"systemd-apps": fmt.Sprintf("10.89.0.%d", h.serial%250)}}}
		h.containers[c.ID] = c
		h.starts = append(h.starts, fakeStart{name, labelsOf(u.text)["toad.operation"], time.Now().Add(h.wallOffset)})
		if a.says != "" {
			h.journal = append(h.journal, fakeLine{time.Now().Add(h.wallOffset), u.name, name, a.says})
		}
		u.container, u.mainPID, u.job, u.begun = c, c.ConmonPID, 0, time.Now()
		h.set(u, "active", "running")
		h.singleton()
		u.exits++
		if a.exitAfter > 0 && !(a.exitOnce && a.exits > 0) {
			h.later(u, a.exitAfter, func() { a.exits++; h.died(u) })
		}
	})
}

func (h *fakeHost) removeNamed(name string) {
	for id, c := range h.containers {
		if c.Name == name {
			if c.Status == "running" {
				h.t.Errorf("--replace killed a running container: %s", name)
			}
			delete(h.containers, id)
		}
	}
}

// singleton is I1: never two instances of a service at once.
func (h *fakeHost) singleton() {
	running := map[string]int{}
	for _, c := range h.containers {
		if c.Status == "running" || c.Status == "stopping" {
			running[c.Labels["toad.service"]]++
		}
	}
	for s, n := range running {
		if n > 1 && s != "" {
			h.t.Errorf("I1: %d instances of %s run at once", n, s)
		}
	}
}

// died is the main process's end by itself.
func (h *fakeHost) died(u *hostUnit) {
	delete(h.containers, u.container.ID)
	h.ended(u, "exit-code")
}

// ended takes an unplanned end on to a restart, or to failed.
func (h *fakeHost) ended(u *hostUnit, result string) {
	u.gen++ // what was to come of this instance does not
	u.container, u.mainPID, u.result = nil, 0, result
	a := h.apps[digestOf(lineOf(u.text, "Image="))]
	if u.text == "" || a != nil && a.noRestart { // a unit that is not loaded any more has lost its Restart=
		u.job = 0
		h.set(u, "failed", "failed")
		return
	}
	h.set(u, "failed", "failed-before-auto-restart")
	h.set(u, "activating", "auto-restart")
	wait := 100 * time.Millisecond
	if a != nil && a.restartAfter > 0 {
		wait = a.restartAfter
	}
	h.later(u, wait, func() {
		u.nrestarts++
		u.job = uint32(h.next())
		h.set(u, "activating", "auto-restart-queued")
		h.run(u)
	})
}

func (h *fakeHost) Stop(ctx context.Context, name string) error {
	if err := h.ask(ctx, &h.managerHangs); err != nil {
		return err
	}
	apply, err := h.step("stop " + name)
	if apply {
		h.stop(name)
	}
	return err
}

func (h *fakeHost) stop(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	u := h.unit(name)
	if u.active == "inactive" || u.active == "failed" && u.sub == "failed" {
		return
	}
	u.job = uint32(h.next())
	if u.container == nil { // between two starts
		h.later(u, time.Millisecond, func() { h.stopped(u, "inactive", "dead", "success") })
		return
	}
	h.set(u, "deactivating", "stop")
	c := u.container
	switch {
	case c.app.unkillable:
		c.Status = "stopping"
		h.later(u, 12*time.Second, func() { // systemd is through with it: failed, timeout, no job, no main process
			u.lingering = []string{"7160 [app]"}
			u.container = nil
			h.stopped(u, "failed", "failed", "timeout")
		})
	case c.app.ignoresTerm:
		h.later(u, 5*time.Second, func() {
			delete(h.containers, c.ID)
			h.stopped(u, "failed", "failed", "exit-code")
		})
	default:
		h.later(u, 500*time.Millisecond, func() {
			delete(h.containers, c.ID)
			h.stopped(u, "inactive", "dead", "success")
		})
	}
}

func (h *fakeHost) stopped(u *hostUnit, active, sub, result string) {
	u.container, u.mainPID, u.job, u.result = nil, 0, 0, result
	h.set(u, active, sub)
	h.collect(u)
}

// reap ends what nobody could kill.
func (h *fakeHost) reap(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	u := h.unit(name)
	u.lingering = nil
	for id, c := range h.containers {
		if c.Unit == name && c.Status == "stopping" {
			delete(h.containers, id)
		}
	}
}

// restartByHand is systemctl restart.
func (h *fakeHost) restartByHand(name string) {
	h.mu.Lock()
	u := h.unit(name)
	if u.text == "" || u.active != "active" {
		h.mu.Unlock()
		return
	}
	if u.container != nil {
		delete(h.containers, u.container.ID)
		u.container, u.mainPID = nil, 0
	}
	u.job, u.nrestarts = uint32(h.next()), 0
	h.set(u, "inactive", "dead")
	h.run(u)
	h.mu.Unlock()
}

// kill ends the main process from outside.
func (h *fakeHost) kill(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if u := h.unit(name); u.container != nil {
		h.died(u)
	}
}

func (h *fakeHost) Reload(ctx context.Context) error {
	if err := h.ask(ctx, &h.managerHangs); err != nil {
		return err
	}
	apply, err := h.step("reload")
	if apply {
		h.reload()
	}
	return err
}

// reload reads every Quadlet again. A file that cannot be loaded takes its whole directory down.
func (h *fakeHost) reload() {
	h.mu.Lock()
	defer h.mu.Unlock()
	dirs := map[string][]string{}
	broken := map[string]bool{}
	_ = filepath.WalkDir(h.quadlets, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && filepath.Ext(path) == ".container" {
			dir := filepath.Dir(path)
			dirs[dir] = append(dirs[dir], path)
			if b, err := os.ReadFile(path); err != nil || checkUnitText(b) != nil {
				broken[dir] = true
			}
		}
		return nil
	})
	found := map[string]string{}
	for dir, paths := range dirs {
		if broken[dir] {
			continue
		}
		for _, p := range paths {
			found[serviceName(filepath.Base(p))] = p
		}
	}
	for name := range found {
		h.unit(name)
	}
	for name, u := range h.units {
		p, ok := found[name]
		u.text, u.source = "", ""
		if b, err := os.ReadFile(p); ok && err == nil && lineOf(string(b), "Image=") != "" && (h.generator == nil || h.generator(filepath.Base(p), b)) {
			u.text, u.source = string(b), p
		}
	}
}

func (h *fakeHost) ResetFailed(ctx context.Context, name string) error {
	if err := h.ask(ctx, &h.managerHangs); err != nil {
		return err
	}
	apply, err := h.step("reset-failed " + name)
	h.mu.Lock()
	defer h.mu.Unlock()
	if u := h.unit(name); apply {
		u.starts = nil
		if u.active == "failed" && u.sub == "failed" {
			u.nrestarts = 0
			h.set(u, "inactive", "dead")
		}
	}
	return err
}

// Run plays the host programs that are run on a candidate's unit, and the journal's.
func (h *fakeHost) Run(ctx context.Context, name string, argv, env []string, output string) (bool, error) {
	if err := h.ask(ctx, &h.managerHangs); err != nil {
		return false, err
	}
	if argv[0] == "/usr/bin/systemd-analyze" {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.analyze, os.WriteFile(output, nil, 0o600)
	}
	if argv[0] == "/usr/bin/podman" {
		h.mu.Lock()
		defer h.mu.Unlock()
		return !h.badFlags, os.WriteFile(output, nil, 0o600)
	}
	if argv[0] == "/usr/bin/journalctl" {
		if err := h.ask(ctx, &h.journalHangs); err != nil {
			return false, err
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		return true, os.WriteFile(output, []byte(h.journalctl(argv)), 0o600)
	}
	dir, _, _ := strings.Cut(strings.TrimPrefix(env[0], "QUADLET_UNIT_DIRS="), ":")
	files, _ := filepath.Glob(filepath.Join(dir, "*.container"))
	var out strings.Builder
	ok := true
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil || checkUnitText(b) != nil || h.generator != nil && !h.generator(filepath.Base(f), b) {
			fmt.Fprintf(&out, "converting %q: refused\n", filepath.Base(f))
			ok = false
			continue
		}
		fmt.Fprintf(&out, "---%s---\n[Unit]\nSourcePath=%s\n[Service]\nExecStart=/usr/bin/podman run -d %s\n", serviceName(filepath.Base(f)), f, lineOf(string(b), "Image="))
	}
	return ok, os.WriteFile(output, []byte(out.String()), 0o600)
}

// journalctl prints the lines that these arguments ask for.
func (h *fakeHost) journalctl(argv []string) string {
	arg := func(name string) string {
		for _, a := range argv {
			if v, ok := strings.CutPrefix(a, name+"="); ok {
				return v
			}
		}
		h.t.Errorf("journalctl without %s: %q", name, argv)
		return ""
	}
	when := func(name string) time.Time {
		v, err := strconv.ParseFloat(strings.TrimPrefix(arg(name), "@"), 64)
		if err != nil {
			h.t.Errorf("journalctl: %v", err)
		}
		return time.UnixMilli(int64(math.Round(v * 1000)))
	}
	var lines []string
	for _, l := range h.journal {
		if l.unit == arg("_SYSTEMD_USER_UNIT") && l.container == arg("CONTAINER_NAME") && !l.at.Before(when("--since")) && !l.at.After(when("--until")) {
			lines = append(lines, l.text)
		}
	}
	most, _ := strconv.Atoi(arg("--lines"))
	return strings.Join(lines[max(0, len(lines)-most):], "")
}

func (h *fakeHost) Incarnation(ctx context.Context) (string, error) {
	if err := h.ask(ctx, &h.managerHangs); err != nil {
		return "", err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return strconv.Itoa(h.incarn), nil
}

func (h *fakeHost) Containers(ctx context.Context, service, unit, name string) ([]container, error) {
	if err := h.ask(ctx, &h.podmanHangs); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []container
	for _, id := range slices.Sorted(maps.Keys(h.containers)) {
		if c := h.containers[id]; c.Name == name || c.Unit == unit || c.Labels["toad.service"] == service {
			list = append(list, c.container)
		}
	}
	return list, nil
}

func (h *fakeHost) Container(ctx context.Context, nameOrID string) (container, error) {
	if err := h.ask(ctx, &h.podmanHangs); err != nil {
		return container{}, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.containers {
		if c.ID == nameOrID || c.Name == nameOrID {
			return c.container, nil
		}
	}
	return container{}, errNotFound
}

func (h *fakeHost) Remove(ctx context.Context, id string) error {
	if err := h.ask(ctx, &h.podmanHangs); err != nil {
		return err
	}
	apply, err := h.step("remove container")
	h.mu.Lock()
	defer h.mu.Unlock()
	if c := h.containers[id]; apply && c != nil {
		if len(h.unit(c.Unit).lingering) > 0 {
			return errors.New(canary + ": given PID did not die within timeout")
		}
		delete(h.containers, id)
	}
	return err
}

func (h *fakeHost) Image(ctx context.Context, ref string) (string, error) {
	if err := h.ask(ctx, &h.podmanHangs); err != nil {
		return "", err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if id, ok := h.images[ref]; ok {
		return id, nil
	}
	return "", errNotFound
}

// Load reads an OCI archive as Podman does: it checks what it stores.
func (h *fakeHost) Load(ctx context.Context, r io.Reader) error {
	if err := h.ask(ctx, &h.podmanHangs); err != nil {
		return fmt.Errorf("%w: %w", errUnreachable, err)
	}
	h.mu.Lock()
	refused := h.loadsRefused > 0
	h.loadsRefused--
	h.mu.Unlock()
	if refused {
		return errUnreachable
	}
	if h.is(&h.loadHangs) {
		<-ctx.Done()
		return ctx.Err()
	}
	apply, stepErr := h.step("load image")
	blobs := map[string][]byte{}
	var index struct {
		Manifests []struct {
			Digest      string            `json:"digest"`
			Annotations map[string]string `json:"annotations"`
		} `json:"manifests"`
	}
	for tr := tar.NewReader(r); ; {
		hd, err := tr.Next()
		if err == io.EOF {
			break
		} else if err != nil {
			return err
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			return err
		}
		if hd.Name == "index.json" {
			if err := json.Unmarshal(b, &index); err != nil {
				return err
			}
		}
		blobs[filepath.Base(hd.Name)] = b
	}
	if !apply {
		return stepErr
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range index.Manifests {
		raw := blobs[strings.TrimPrefix(m.Digest, "sha256:")]
		var manifest struct {
			Config struct {
				Digest string `json:"digest"`
			} `json:"config"`
		}
		if sha(raw) != m.Digest || json.Unmarshal(raw, &manifest) != nil || sha(blobs[strings.TrimPrefix(manifest.Config.Digest, "sha256:")]) != manifest.Config.Digest {
			return errors.New("archive is damaged")
		}
		h.images[m.Annotations["org.opencontainers.image.ref.name"]] = manifest.Config.Digest
	}
	return stepErr
}

func (h *fakeHost) Starts(ctx context.Context, name, operation string, since time.Time) (int, error) {
	if err := h.ask(ctx, &h.podmanHangs); err != nil {
		return 0, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for _, s := range h.starts {
		if s.name == name && s.operation == operation && !s.at.Before(since) {
			n++
		}
	}
	return n, nil
}

func (h *fakeHost) Exists(ctx context.Context, kind, name string) (bool, error) {
	if err := h.ask(ctx, &h.podmanHangs); err != nil {
		return false, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return kind != "network" || h.networks[name], nil
}

// probe asks the app at an address.
func (h *fakeHost) probe(ctx context.Context, t target) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.containers {
		if slow := c.app.slow; slow > 0 && c.Addresses["systemd-apps"] == t.address {
			h.mu.Unlock()
			select {
			case <-time.After(slow):
			case <-ctx.Done():
			}
			h.mu.Lock()
			if ctx.Err() != nil {
				return notReady("no answer in time")
			}
			break
		}
	}
	for _, c := range h.containers {
		if c.Status == "running" && c.Addresses["systemd-apps"] == t.address {
			up := time.Since(c.begun)
			switch {
			case c.app.readyAfter < 0 || up < c.app.readyAfter:
				return notReady("status 503")
			case c.app.readyFor > 0 && up >= c.app.readyAfter+c.app.readyFor:
				return notReady("status 503")
			}
			return nil
		}
	}
	return notReady("nothing accepts connections")
}

// reboot is a hard reset: everything is gone, and what has [Install] comes up again.
func (h *fakeHost) reboot() {
	h.mu.Lock()
	h.booted++
	h.incarn++
	for _, c := range h.containers { // nobody removed what was --rm: Podman keeps the records
		c.Status, c.ConmonPID, c.Addresses = "created", 0, nil
	}
	clear(h.units)
	h.mu.Unlock()
	h.reload()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(h.units)) {
		if u := h.units[name]; strings.Contains(u.text, "[Install]") {
			u.job = uint32(h.next())
			h.run(u)
		}
	}
}

// prune is podman system prune --all --force.
func (h *fakeHost) prune() {
	h.mu.Lock()
	defer h.mu.Unlock()
	used := map[string]bool{}
	for _, c := range h.containers {
		used[c.ImageName] = true
	}
	maps.DeleteFunc(h.images, func(ref, _ string) bool { return !used[ref] })
}

// running lists the digests that run as containers of a service.
func (h *fakeHost) running(service string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []string
	for _, c := range h.containers {
		if c.Labels["toad.service"] == service && c.Status != "created" {
			list = append(list, c.ImageName)
		}
	}
	return list
}

func (h *fakeHost) host() *host {
	return &host{
		units: h, containers: h, fetch: h.fetch, inspect: h.inspect, probe: h.probe, quadlets: h.quadlets,
		wall: func() time.Time { h.mu.Lock(); defer h.mu.Unlock(); return time.Now().Add(h.wallOffset) },
		boot: func() time.Duration { return time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)) },
		bootID: func() string {
			h.mu.Lock()
			defer h.mu.Unlock()
			return h.kernelBoot
		},
		hostPaths: func(context.Context) (string, string, error) { return h.data, h.quadlets, nil },
	}
}

var _ units = (*fakeHost)(nil)
var _ containers = (*fakeHost)(nil)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
