// systemd.go is everything Toad says to the systemd user manager, over D-Bus. It asks, tells and
// reports; whether what it reports is good is decided elsewhere. Every call is bounded here, beside
// the caller's context: the manager itself can hang (measured: one that forks into a frozen control
// group answers nobody until that is thawed).
package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/godbus/dbus/v5"
)

var (
	// errBusGone: nobody listens on the bus socket. A container that mounted the socket's file is
	// refused for ever once dbus.socket made a new one (measured); starting it again mounts the new one.
	errBusGone = errors.New("the bus refuses connections")
	// errNoAnswer: the driver's own timeout passed. The request stands: a hung manager carries it out
	// once it goes on (measured: a start given up after 2 s was made after the thaw), even if its
	// sender is gone by then.
	errNoAnswer = errors.New("systemd does not answer")
)

const (
	systemdName      = "org.freedesktop.systemd1"
	systemdPath      = dbus.ObjectPath("/org/freedesktop/systemd1")
	managerInterface = "org.freedesktop.systemd1.Manager"
	unitInterface    = "org.freedesktop.systemd1.Unit"
	serviceInterface = "org.freedesktop.systemd1.Service"
	properties       = "org.freedesktop.DBus.Properties"

	noSuchUnit     = "org.freedesktop.systemd1.NoSuchUnit" // no such file, or: not loaded
	badUnitSetting = "org.freedesktop.systemd1.BadUnitSetting"
	unitMasked     = "org.freedesktop.systemd1.UnitMasked"
	unitExists     = "org.freedesktop.systemd1.UnitExists"
	unknownObject  = "org.freedesktop.DBus.Error.UnknownObject"
)

type systemd struct {
	address       string
	timeout       time.Duration // of everything but the next two; connecting is part of the call that needs it
	reloadTimeout time.Duration // Reload answers only when the manager has read all units again
	runTimeout    time.Duration // a program that Run runs has as long, and timeout is for the calls beside it

	// turn is taken to connect, to hold and to release, one at a time. Every holder is bounded.
	turn chan struct{}

	mu   sync.Mutex // guards what follows; never held across a call
	conn *dbus.Conn // nil before the first call
	held map[dbus.ObjectPath]*heldUnit
	runs map[string]chan removedJob // by unit name
}

var _ units = (*systemd)(nil)

// heldUnit is a unit that callers hold, with one reference of ours for them all.
type heldUnit struct {
	name       string
	readers    []*unitSignals
	referenced bool       // changed only by who has the turn
	last       unitStatus // merged from signals
	service    bool       // the service's half of last was signalled on this connection
}

type removedJob struct {
	path   dbus.ObjectPath
	result string
}

func newSystemd(address string) *systemd {
	return &systemd{
		address:       address,
		timeout:       10 * time.Second,
		reloadTimeout: time.Minute,
		runTimeout:    50 * time.Second,
		turn:          make(chan struct{}, 1),
		held:          make(map[dbus.ObjectPath]*heldUnit),
		runs:          make(map[string]chan removedJob),
	}
}

func (s *systemd) Unit(ctx context.Context, name string) (unitStatus, error) {
	ctx, cancel := bounded(ctx, s.timeout)
	defer cancel()
	conn, err := s.connection(ctx)
	if err != nil {
		return unitStatus{}, fmt.Errorf("looking at %s: %w", name, err)
	}
	path, p, err := s.properties(ctx, conn, name)
	if unloaded(err) { // collected between the two calls
		path, p, err = s.properties(ctx, conn, name)
	}
	if unloaded(err) {
		// The states stay empty: systemd named none.
		return unitStatus{LoadState: "not-found"}, nil
	}
	if err != nil {
		return unitStatus{}, fmt.Errorf("looking at %s: %w", name, err)
	}
	u, err := decodeUnit(p)
	if err != nil {
		return unitStatus{}, fmt.Errorf("looking at %s: %w", name, err)
	}
	if u.LoadState == "loaded" {
		if err := s.referLate(ctx, path); err != nil {
			return unitStatus{}, fmt.Errorf("holding %s: %w", name, err)
		}
	}
	return u, nil
}

// properties loads the unit and reads all its properties in one message: the manager has a single
// thread, so they are of one moment.
func (s *systemd) properties(ctx context.Context, conn *dbus.Conn, name string) (path dbus.ObjectPath, p map[string]dbus.Variant, err error) {
	if err := call(ctx, conn, systemdPath, managerInterface+".LoadUnit", name).Store(&path); err != nil {
		return "", nil, answer(ctx, err)
	}
	if err := call(ctx, conn, path, properties+".GetAll", "").Store(&p); err != nil {
		return "", nil, answer(ctx, err)
	}
	return path, p, nil
}

// decodeUnit wants every property that it reads: a missing counter is no counter of 0.
func decodeUnit(p map[string]dbus.Variant) (unitStatus, error) {
	var u unitStatus
	var job struct {
		ID   uint32
		Path dbus.ObjectPath
	}
	var invocation []byte
	var commands []struct {
		Path                                       string
		Argv                                       []string
		Ignore                                     bool
		Start, StartMonotonic, Exit, ExitMonotonic uint64
		PID                                        uint32
		Code, Status                               int32
	}
	for name, to := range map[string]any{
		"LoadState": &u.LoadState, "ActiveState": &u.ActiveState, "SubState": &u.SubState, "Result": &u.Result,
		"Job": &job, "InvocationID": &invocation, "NRestarts": &u.NRestarts, "MainPID": &u.MainPID,
		"ControlGroup": &u.ControlGroup, "SourcePath": &u.SourcePath, "FragmentPath": &u.FragmentPath,
		"NeedDaemonReload": &u.NeedDaemonReload, "ExecStart": &commands,
	} {
		if err := decodeProperty(p, name, to); err != nil {
			return unitStatus{}, err
		}
	}
	for _, name := range []string{"TriggeredBy", "RequiredBy", "RequisiteOf", "BoundBy", "ConsistsOf", "UpheldBy", "WantedBy"} {
		var names []string
		if err := decodeProperty(p, name, &names); err != nil {
			return unitStatus{}, err
		}
		u.Dependents = append(u.Dependents, names...)
	}
	slices.Sort(u.Dependents)
	u.Dependents = slices.Compact(u.Dependents)
	u.Job = job.ID
	u.InvocationID = invocationID(invocation)
	if n := len(commands); n > 0 {
		u.ExecStart = commands[n-1].Argv
	}
	return u, nil
}

func decodeProperty(p map[string]dbus.Variant, name string, to any) error {
	v, ok := p[name]
	if !ok {
		return fmt.Errorf("reading property %s: systemd gave none", name)
	}
	if err := v.Store(to); err != nil {
		return fmt.Errorf("reading property %s: %w", name, err)
	}
	return nil
}

// invocationID returns "" for a unit that was never started since it was loaded: no bytes or zeros.
func invocationID(b []byte) string {
	if !slices.ContainsFunc(b, func(c byte) bool { return c != 0 }) {
		return ""
	}
	return hex.EncodeToString(b)
}

// Processes finds nothing in a unit that is not loaded. systemd never unloads a unit whose control
// group it knows to be populated, but it knows only what it tracks: a process that left the group,
// or a group from before the manager's own restart, it does not. So "none" of an unloaded unit is
// no proof of an end; hold the unit, and look whether it is loaded.
func (s *systemd) Processes(ctx context.Context, name string) ([]string, error) {
	ctx, cancel := bounded(ctx, s.timeout)
	defer cancel()
	conn, err := s.connection(ctx)
	if err != nil {
		return nil, fmt.Errorf("listing processes of %s: %w", name, err)
	}
	var found []struct {
		ControlGroup string
		PID          uint32
		Command      string
	}
	err = call(ctx, conn, systemdPath, managerInterface+".GetUnitProcesses", name).Store(&found)
	if isError(err, noSuchUnit) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing processes of %s: %w", name, answer(ctx, err))
	}
	var list []string
	for _, p := range found {
		list = append(list, strconv.FormatUint(uint64(p.PID), 10)+" "+p.Command)
	}
	return list, nil
}

// Hold collects signals at once. systemd refuses to reference what it cannot load (a unit whose file
// is not there yet, or no more, be it running or not); then the first Unit that finds it loaded
// makes up for it. Release waits its turn and then tells systemd without waiting for an answer.
func (s *systemd) Hold(ctx context.Context, name string) (*unitSignals, func(), error) {
	ctx, cancel := bounded(ctx, s.timeout)
	defer cancel()
	signals, release, err := s.hold(ctx, name)
	if err != nil {
		return nil, nil, fmt.Errorf("holding %s: %w", name, err)
	}
	return signals, release, nil
}

func (s *systemd) hold(ctx context.Context, name string) (*unitSignals, func(), error) {
	if err := s.takeTurn(ctx); err != nil {
		return nil, nil, err
	}
	defer s.endTurn()
	conn, err := s.connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	var path dbus.ObjectPath
	if err := call(ctx, conn, systemdPath, managerInterface+".LoadUnit", name).Store(&path); err != nil {
		return nil, nil, answer(ctx, err)
	}

	signals := newUnitSignals()
	s.mu.Lock()
	h := s.held[path]
	first := h == nil
	if first {
		h = &heldUnit{name: name}
		s.held[path] = h // before the match: no signal is missed from there on
	}
	h.readers = append(h.readers, signals)
	s.mu.Unlock()

	if first {
		if err := s.refer(ctx, conn, path, h); err != nil {
			s.mu.Lock()
			delete(s.held, path)
			s.mu.Unlock()
			unrefer(conn, name) // it may have been only the answer that was lost
			removeMatch(conn, changesOf(path))
			return nil, nil, answer(ctx, err)
		}
	}

	var once sync.Once
	release := func() {
		once.Do(func() {
			s.turn <- struct{}{}
			defer s.endTurn()
			s.mu.Lock()
			h.readers = slices.DeleteFunc(h.readers, func(r *unitSignals) bool { return r == signals })
			last := len(h.readers) == 0
			if last {
				delete(s.held, path)
			}
			conn := s.conn
			s.mu.Unlock()
			if last {
				if h.referenced {
					unrefer(conn, name)
				}
				removeMatch(conn, changesOf(path))
			}
		})
	}
	return signals, release, nil
}

// refer asks for the unit's signals and a reference to it, on a connection that has neither.
func (s *systemd) refer(ctx context.Context, conn *dbus.Conn, path dbus.ObjectPath, h *heldUnit) error {
	if err := addMatch(ctx, conn, changesOf(path)); err != nil {
		return err
	}
	return s.reference(ctx, conn, h)
}

// reference wants the turn. systemd counts references by connection and drops a connection's with it,
// so each on a connection wants one unrefer.
func (s *systemd) reference(ctx context.Context, conn *dbus.Conn, h *heldUnit) error {
	err := call(ctx, conn, systemdPath, managerInterface+".RefUnit", h.name).Err
	s.mu.Lock()
	h.referenced = err == nil
	s.mu.Unlock()
	if isError(err, noSuchUnit) || isError(err, badUnitSetting) || isError(err, unitMasked) {
		return nil
	}
	return err
}

// referLate references a held unit that could not be referenced before.
func (s *systemd) referLate(ctx context.Context, path dbus.ObjectPath) error {
	missing := func() *heldUnit {
		s.mu.Lock()
		defer s.mu.Unlock()
		if h := s.held[path]; h != nil && !h.referenced {
			return h
		}
		return nil
	}
	if missing() == nil {
		return nil
	}
	if err := s.takeTurn(ctx); err != nil {
		return err
	}
	defer s.endTurn()
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	if h := missing(); h != nil {
		return answer(ctx, s.reference(ctx, conn, h))
	}
	return nil
}

// unrefer does not wait for the answer: there is nothing to do about a refusal.
func unrefer(conn *dbus.Conn, name string) {
	conn.Object(systemdName, systemdPath).Go(managerInterface+".UnrefUnit", dbus.FlagNoAutoStart, nil, name)
}

func changesOf(path dbus.ObjectPath) string {
	return "type='signal',sender='" + systemdName + "',interface='" + properties + "',member='PropertiesChanged',path='" + string(path) + "'"
}

func removalsOfJobs(unit string) string {
	return "type='signal',sender='" + systemdName + "',interface='" + managerInterface + "',member='JobRemoved',arg2='" + unit + "'"
}

func addMatch(ctx context.Context, conn *dbus.Conn, rule string) error {
	return conn.BusObject().CallWithContext(ctx, "org.freedesktop.DBus.AddMatch", 0, rule).Err
}

func removeMatch(conn *dbus.Conn, rule string) {
	conn.BusObject().Go("org.freedesktop.DBus.RemoveMatch", 0, nil, rule)
}

// DeliverSignal is called by godbus as each signal arrives, in order, and before any later message
// is read. It must not block, and need not: a unit's signals are bounded by unitSignals, a job's by
// its channel. (godbus's own channels lose the order, or queue without bound, when nobody reads.)
func (s *systemd) DeliverSignal(iface, member string, signal *dbus.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch iface + "." + member {
	case properties + ".PropertiesChanged":
		var of string
		var changed map[string]dbus.Variant
		var invalidated []string
		h := s.held[signal.Path]
		if h == nil || dbus.Store(signal.Body, &of, &changed, &invalidated) != nil {
			return
		}
		h.change(of, changed)
	case managerInterface + ".JobRemoved":
		var id uint32
		var job removedJob
		var unit string
		if dbus.Store(signal.Body, &id, &job.path, &unit, &job.result) != nil {
			return
		}
		select {
		case s.runs[unit] <- job: // never ready when nil
		default:
		}
	}
}

// change merges one signal. systemd sends the service's half first, then the unit's, each with full
// values, so that a client that acts on the second sees both as of one moment (its source says that
// clients may rely on this order).
func (h *heldUnit) change(of string, changed map[string]dbus.Variant) {
	switch of {
	case serviceInterface:
		if n, ok := changed["NRestarts"].Value().(uint32); ok {
			h.last.NRestarts = n
		}
		if pid, ok := changed["MainPID"].Value().(uint32); ok {
			h.last.MainPID = pid
		}
		h.service = true
	case unitInterface:
		if state, ok := changed["ActiveState"].Value().(string); ok {
			h.last.ActiveState = state
		}
		if state, ok := changed["SubState"].Value().(string); ok {
			h.last.SubState = state
		}
		if id, ok := changed["InvocationID"].Value().([]byte); ok {
			h.last.InvocationID = invocationID(id)
		}
		if !h.service { // the match began between the two
			h.wake()
			return
		}
		for _, r := range h.readers {
			r.put(h.last)
		}
	}
}

// wake makes readers look again without a signal.
func (h *heldUnit) wake() {
	for _, r := range h.readers {
		select {
		case r.C <- struct{}{}:
		default:
		}
	}
}

func (s *systemd) wakeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.held {
		h.wake()
	}
}

func (s *systemd) Start(ctx context.Context, name string) error {
	if err := s.manager(ctx, s.timeout, "StartUnit", name, "replace"); err != nil {
		return fmt.Errorf("starting %s: %w", name, err)
	}
	return nil
}

// Stop of a unit that is neither running nor has a file is refused with errNotFound.
func (s *systemd) Stop(ctx context.Context, name string) error {
	if err := s.manager(ctx, s.timeout, "StopUnit", name, "replace"); err != nil {
		return fmt.Errorf("stopping %s: %w", name, err)
	}
	return nil
}

func (s *systemd) Reload(ctx context.Context) error {
	if err := s.manager(ctx, s.reloadTimeout, "Reload"); err != nil {
		return fmt.Errorf("reloading units: %w", err)
	}
	return nil
}

// ResetFailed has nothing to do for a unit that is not loaded: such a one is not failed.
func (s *systemd) ResetFailed(ctx context.Context, name string) error {
	err := s.manager(ctx, s.timeout, "ResetFailedUnit", name)
	if err != nil && !errors.Is(err, errNotFound) {
		return fmt.Errorf("resetting %s: %w", name, err)
	}
	return nil
}

// manager calls one method of the manager whose result does not matter.
func (s *systemd) manager(ctx context.Context, timeout time.Duration, method string, args ...any) error {
	ctx, cancel := bounded(ctx, timeout)
	defer cancel()
	conn, err := s.connection(ctx)
	if err != nil {
		return err
	}
	return answer(ctx, call(ctx, conn, systemdPath, managerInterface+"."+method, args...).Err)
}

func (s *systemd) Incarnation(ctx context.Context) (string, error) {
	ctx, cancel := bounded(ctx, s.timeout)
	defer cancel()
	conn, err := s.connection(ctx)
	if err != nil {
		return "", fmt.Errorf("reading the manager's start: %w", err)
	}
	var v dbus.Variant
	var usec uint64
	err = call(ctx, conn, systemdPath, properties+".Get", managerInterface, "UserspaceTimestampMonotonic").Store(&v)
	if err == nil {
		err = v.Store(&usec)
	}
	if err != nil {
		return "", fmt.Errorf("reading the manager's start: %w", answer(ctx, err))
	}
	return strconv.FormatUint(usec, 10), nil
}

// Run fails when the program could not be run, ran too long, or was killed. A caller that gives up
// leaves it running for what is left of its time; the next Run of the same name ends it first.
func (s *systemd) Run(ctx context.Context, name string, argv, env []string, output string) (ok bool, err error) {
	ctx, cancel := bounded(ctx, s.runTimeout+s.timeout)
	defer cancel()
	status, err := s.run(ctx, name, argv, env, output)
	if err != nil {
		return false, fmt.Errorf("running %s as %s: %w", argv[0], name, err)
	}
	return status == 0, nil
}

func (s *systemd) run(ctx context.Context, name string, argv, env []string, output string) (status int32, err error) {
	conn, err := s.connection(ctx)
	if err != nil {
		return 0, err
	}

	// JobRemoved may come before the reply that names the job, so both are asked for first.
	jobs := make(chan removedJob, 16)
	s.mu.Lock()
	if s.runs[name] != nil {
		s.mu.Unlock()
		return 0, errors.New("it is running already")
	}
	s.runs[name] = jobs
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.runs, name)
		s.mu.Unlock()
	}()
	if err := addMatch(ctx, conn, removalsOfJobs(name)); err != nil {
		return 0, answer(ctx, err)
	}
	defer removeMatch(conn, removalsOfJobs(name))

	type property struct {
		Name  string
		Value dbus.Variant
	}
	type command struct {
		Path  string
		Argv  []string
		Flags []string
	}
	type auxiliary struct {
		Name       string
		Properties []property
	}
	start := func() *dbus.Call {
		return call(ctx, conn, systemdPath, managerInterface+".StartTransientUnit", name, "fail", []property{
			{"Type", dbus.MakeVariant("oneshot")},
			{"CollectMode", dbus.MakeVariant("inactive-or-failed")},
			{"AddRef", dbus.MakeVariant(true)}, // else its end could not be read
			// Without the flag, $ in an argument would be systemd's; % is not over D-Bus (measured).
			{"ExecStartEx", dbus.MakeVariant([]command{{argv[0], argv, []string{"no-env-expand"}}})},
			{"Environment", dbus.MakeVariant(env)},
			{"StandardOutputFileToTruncate", dbus.MakeVariant(output)},
			{"StandardErrorFileToTruncate", dbus.MakeVariant(output)},
			{"TimeoutStartUSec", dbus.MakeVariant(uint64(s.runTimeout.Microseconds()))},
			{"TimeoutStartFailureMode", dbus.MakeVariant("kill")}, // a deaf program would outlast ours
		}, []auxiliary{})
	}
	defer unrefer(conn, name)

	started := start()
	if isError(started.Err, unitExists) {
		// Left by a process that died while its program ran. Stopped, it is collected; it may be already.
		stop := call(ctx, conn, systemdPath, managerInterface+".StopUnit", name, "replace")
		if _, err := await(ctx, conn, jobs, stop); err != nil && !errors.Is(err, errNotFound) {
			return 0, err
		}
		started = start()
	}
	result, err := await(ctx, conn, jobs, started)
	if err != nil {
		return 0, err
	}
	if result != "done" && result != "failed" {
		return 0, fmt.Errorf("its job ended as %s", result)
	}

	_, p, err := s.properties(ctx, conn, name)
	if err != nil {
		return 0, err
	}
	var end string
	var code int32
	for name, to := range map[string]any{"Result": &end, "ExecMainCode": &code, "ExecMainStatus": &status} {
		if err := decodeProperty(p, name, to); err != nil {
			return 0, err
		}
	}
	const exited = 1 // CLD_EXITED
	switch {
	case end != "success" && end != "exit-code":
		return 0, fmt.Errorf("it ended as %s", end)
	case code != exited:
		return 0, errors.New("it left no exit status")
	case status >= 200 && status <= 245:
		// systemd.exec(5): systemd's own, for a program that it could not set up or execute (203: not
		// found, 209: output file). A program that exits so itself is taken for one.
		return 0, fmt.Errorf("it could not be executed: exit status %d", status)
	}
	return status, nil
}

// await returns the result of the job that queued returns.
func await(ctx context.Context, conn *dbus.Conn, jobs <-chan removedJob, queued *dbus.Call) (string, error) {
	var path dbus.ObjectPath
	if err := queued.Store(&path); err != nil {
		return "", answer(ctx, err)
	}
	for {
		select {
		case job := <-jobs:
			if job.path == path {
				return job.result, nil
			}
		case <-conn.Context().Done():
			return "", errors.New("the bus connection was lost")
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
}

// connection returns the open connection, or connects. A call that times out leaves it open:
// godbus drops the late answer, and another connection would reach the same manager.
func (s *systemd) connection(ctx context.Context) (*dbus.Conn, error) {
	s.mu.Lock()
	conn := s.conn
	s.mu.Unlock()
	if conn != nil && conn.Connected() {
		return conn, nil
	}
	if err := s.takeTurn(ctx); err != nil {
		return nil, err
	}
	defer s.endTurn()
	return s.connect(ctx)
}

// connect wants the turn. It returns the open connection, or a new one on which everything that was
// held is held again. What was signalled in between is lost, so the readers are made to look; they
// are also when a connection is lost, since only a look connects again.
func (s *systemd) connect(ctx context.Context) (*dbus.Conn, error) {
	s.mu.Lock()
	conn := s.conn
	held := maps.Clone(s.held)
	s.mu.Unlock()
	if conn != nil && conn.Connected() {
		return conn, nil
	}
	ctx, cancel := bounded(ctx, s.timeout)
	defer cancel()
	conn, err := s.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("connecting to the bus: %w", err)
	}
	s.mu.Lock()
	for _, h := range s.held {
		h.service = false
	}
	s.mu.Unlock()
	// Without a subscriber systemd does not signal. Subscribed, it signals everything to the bus,
	// which passes on what matches.
	if err := call(ctx, conn, systemdPath, managerInterface+".Subscribe").Err; err != nil {
		conn.Close()
		return nil, fmt.Errorf("subscribing to signals: %w", answer(ctx, err))
	}
	for path, h := range held {
		if err := s.refer(ctx, conn, path, h); err != nil {
			conn.Close()
			return nil, fmt.Errorf("holding %s again: %w", h.name, answer(ctx, err))
		}
	}
	s.mu.Lock()
	s.conn = conn
	s.mu.Unlock()
	context.AfterFunc(conn.Context(), s.wakeAll)
	s.wakeAll()
	return conn, nil
}

func (s *systemd) dial(ctx context.Context) (*dbus.Conn, error) {
	path, ok := strings.CutPrefix(s.address, "unix:path=")
	if !ok {
		return nil, fmt.Errorf("address %q is not unix:path=PATH", s.address)
	}
	path, _, _ = strings.Cut(path, ",")
	socket, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", errBusGone, err)
	}
	if err != nil {
		return nil, err
	}
	conn, err := dbus.NewConn(busSocket{socket, s.timeout}, dbus.WithSignalHandler(s))
	if err != nil {
		socket.Close()
		return nil, err
	}
	// Neither of the next two takes a context. godbus authenticates EXTERNAL and names no user, so
	// that the bus takes the socket's peer: in a rootless container the process believes to be
	// another user than the bus sees, and a name is rejected (measured).
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	if err = conn.Auth(nil); err == nil {
		err = conn.Hello()
	}
	if !stop() {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// busSocket bounds each write: godbus writes under a lock that no context reaches, so a bus that
// reads no more would hold every caller. After a failed write half a message may have been sent,
// and the connection is of no more use.
type busSocket struct {
	net.Conn
	timeout time.Duration
}

func (b busSocket) Write(p []byte) (int, error) {
	b.SetWriteDeadline(time.Now().Add(b.timeout))
	n, err := b.Conn.Write(p)
	if err != nil {
		b.Close()
	}
	return n, err
}

func (s *systemd) takeTurn(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s *systemd) endTurn() { <-s.turn }

// call never has the bus start systemd: a manager that is not on the bus is an error at once.
func call(ctx context.Context, conn *dbus.Conn, path dbus.ObjectPath, method string, args ...any) *dbus.Call {
	return conn.Object(systemdName, path).CallWithContext(ctx, method, dbus.FlagNoAutoStart, args...)
}

func bounded(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, timeout, fmt.Errorf("%w within %s", errNoAnswer, timeout))
}

// answer gives an error of a call its meaning: by the context's cause, or by the D-Bus name.
func answer(ctx context.Context, err error) error {
	var e dbus.Error
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return context.Cause(ctx)
	case isError(err, noSuchUnit):
		return fmt.Errorf("%w: %w", errNotFound, err)
	case errors.As(err, &e):
		return fmt.Errorf("%s: %w", e.Name, err)
	}
	return err
}

// isError judges by the name alone: texts are for people.
func isError(err error, name string) bool {
	var e dbus.Error
	return errors.As(err, &e) && e.Name == name
}

// unloaded tells that systemd had no such unit in memory at the moment of a call on it.
func unloaded(err error) bool { return isError(err, noSuchUnit) || isError(err, unknownObject) }
