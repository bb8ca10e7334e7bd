package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
)

// testBus is a real dbus-daemon; systemd on it is a fakeManager.
type testBus struct {
	address string
	daemon  *exec.Cmd
}

func startBus(t *testing.T, address string) *testBus {
	t.Helper()
	daemon := exec.Command("dbus-daemon", "--session", "--nofork", "--nosyslog", "--print-address=1", "--address="+address)
	out, err := daemon.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := daemon.Start(); err != nil {
		t.Fatalf("starting dbus-daemon, which this test needs (Debian package dbus-daemon): %v", err)
	}
	bus := &testBus{address, daemon}
	t.Cleanup(bus.kill)
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil { // it says so once it listens
		t.Fatalf("waiting for dbus-daemon: %v", err)
	}
	return bus
}

func (b *testBus) kill() {
	b.daemon.Process.Kill()
	b.daemon.Wait()
}

// freeze stops the daemon: it accepts and buffers, and reads nothing. It returns how to go on.
func (b *testBus) freeze(t *testing.T) (thaw func()) {
	t.Helper()
	if err := b.daemon.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus
	if _, err := syscall.Wait4(b.daemon.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("waiting for dbus-daemon to stop: %v, %v", status, err)
	}
	return func() { b.daemon.Process.Signal(syscall.SIGCONT) }
}

// fakeManager answers as systemd does, as far as the driver asks. Like systemd it counts references
// by connection, and refuses one that is given back twice.
type fakeManager struct {
	t    *testing.T
	conn *dbus.Conn

	// before is asked first in every method, with the unit if it names one; an error is the answer.
	before func(method, unit string) *dbus.Error

	mu         sync.Mutex
	units      map[string]map[string]dbus.Variant
	processes  map[string][]fakeProcess
	refs       map[string]int
	calls      []string // "method unit"
	job        int
	transient  map[string]dbus.Variant // properties of the last transient unit
	unreferred chan string
}

type fakeProcess struct {
	ControlGroup string
	PID          uint32
	Command      string
}

type fakeProperty struct {
	Name  string
	Value dbus.Variant
}

type fakeAuxiliary struct {
	Name       string
	Properties []fakeProperty
}

func newFakeManager(t *testing.T, bus *testBus) *fakeManager {
	t.Helper()
	f := &fakeManager{
		t:          t,
		units:      map[string]map[string]dbus.Variant{"app.service": fakeUnit(map[string]any{"LoadState": "loaded"})},
		processes:  map[string][]fakeProcess{},
		refs:       map[string]int{},
		unreferred: make(chan string, 100),
	}
	f.attach(bus)
	return f
}

// attach puts the manager on a bus.
func (f *fakeManager) attach(bus *testBus) {
	f.t.Helper()
	conn, err := dbus.Connect(bus.address)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { conn.Close() })
	f.conn = conn
	if err := conn.Export(fakeManagerMethods{f}, systemdPath, managerInterface); err != nil {
		f.t.Fatal(err)
	}
	if err := conn.ExportSubtree(fakePropertyMethods{f}, systemdPath, properties); err != nil {
		f.t.Fatal(err)
	}
	if _, err := conn.RequestName(systemdName, 0); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fakeManager) enter(method, unit string) *dbus.Error {
	f.mu.Lock()
	f.calls = append(f.calls, strings.TrimSpace(method+" "+unit))
	before := f.before
	f.mu.Unlock()
	if before == nil {
		return nil
	}
	return before(method, unit)
}

func (f *fakeManager) setBefore(before func(method, unit string) *dbus.Error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.before = before
}

func (f *fakeManager) setUnit(name string, u map[string]dbus.Variant) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.units[name] = u
}

func (f *fakeManager) count(call string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, c := range f.calls {
		if c == call {
			n++
		}
	}
	return n
}

func (f *fakeManager) references(unit string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.refs[unit]
}

func (f *fakeManager) nextJob() dbus.ObjectPath {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.job++
	return dbus.ObjectPath(fmt.Sprintf("/org/freedesktop/systemd1/job/%d", f.job))
}

func (f *fakeManager) removeJob(job dbus.ObjectPath, unit, result string) {
	f.conn.Emit(systemdPath, managerInterface+".JobRemoved", uint32(1), job, unit, result)
}

// change signals one change of a unit in systemd's order.
func (f *fakeManager) change(unit string, restarts uint32, active, sub string, invocation byte) {
	f.changeService(unit, restarts)
	f.changeUnit(unit, active, sub, invocation)
}

func (f *fakeManager) changeService(unit string, restarts uint32) {
	f.conn.Emit(fakePath(unit), properties+".PropertiesChanged", serviceInterface, map[string]dbus.Variant{
		"NRestarts": dbus.MakeVariant(restarts), "MainPID": dbus.MakeVariant(100 + restarts),
	}, []string{"ExecStart"})
}

func (f *fakeManager) changeUnit(unit, active, sub string, invocation byte) {
	f.conn.Emit(fakePath(unit), properties+".PropertiesChanged", unitInterface, map[string]dbus.Variant{
		"ActiveState": dbus.MakeVariant(active), "SubState": dbus.MakeVariant(sub),
		"InvocationID": dbus.MakeVariant(fakeInvocation(invocation)),
	}, []string{})
}

func fakePath(unit string) dbus.ObjectPath {
	return dbus.ObjectPath("/org/freedesktop/systemd1/unit/" + strings.NewReplacer("-", "_2d", ".", "_2e").Replace(unit))
}

func fakeName(path dbus.ObjectPath) string {
	return strings.NewReplacer("_2d", "-", "_2e", ".").Replace(filepath.Base(string(path)))
}

func fakeInvocation(b byte) []byte { return slices.Repeat([]byte{b}, 16) }

// fakeUnit is what GetAll gives for a unit without a file, and changes of it.
func fakeUnit(changes map[string]any) map[string]dbus.Variant {
	p := map[string]any{
		"Id": "app.service", "LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead", "Result": "success",
		"Job": fakeJob{0, "/"}, "InvocationID": []byte{}, "NRestarts": uint32(0), "MainPID": uint32(0),
		"ControlGroup": "", "SourcePath": "", "FragmentPath": "", "NeedDaemonReload": false, "ExecStart": []fakeCommand{},
		"TriggeredBy": []string{}, "RequiredBy": []string{}, "RequisiteOf": []string{}, "BoundBy": []string{},
		"ConsistsOf": []string{}, "UpheldBy": []string{}, "WantedBy": []string{},
		"ExecMainCode": int32(0), "ExecMainStatus": int32(0),
	}
	for name, v := range changes {
		p[name] = v
	}
	u := map[string]dbus.Variant{}
	for name, v := range p {
		u[name] = dbus.MakeVariant(v)
	}
	return u
}

type fakeJob struct {
	ID   uint32
	Path dbus.ObjectPath
}

type fakeCommand struct {
	Path         string
	Argv         []string
	Ignore       bool
	T1           uint64
	T2           uint64
	T3           uint64
	T4           uint64
	PID          uint32
	Code, Status int32
}

type fakePropertyMethods struct{ *fakeManager }

func (f fakePropertyMethods) GetAll(msg dbus.Message, iface string) (map[string]dbus.Variant, *dbus.Error) {
	unit := fakeName(msg.Headers[dbus.FieldPath].Value().(dbus.ObjectPath))
	if err := f.enter("GetAll", unit); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if u, ok := f.units[unit]; ok {
		return u, nil
	}
	return fakeUnit(nil), nil
}

func (f fakePropertyMethods) Get(iface, name string) (dbus.Variant, *dbus.Error) {
	if err := f.enter("Get", name); err != nil {
		return dbus.Variant{}, err
	}
	return dbus.MakeVariant(uint64(12345678901)), nil
}

type fakeManagerMethods struct{ *fakeManager }

func (f fakeManagerMethods) Subscribe() *dbus.Error { return f.enter("Subscribe", "") }

func (f fakeManagerMethods) Reload() *dbus.Error { return f.enter("Reload", "") }

func (f fakeManagerMethods) ResetFailedUnit(unit string) *dbus.Error {
	return f.enter("ResetFailedUnit", unit)
}

func (f fakeManagerMethods) LoadUnit(unit string) (dbus.ObjectPath, *dbus.Error) {
	return fakePath(unit), f.enter("LoadUnit", unit)
}

func (f fakeManagerMethods) GetUnitProcesses(unit string) ([]fakeProcess, *dbus.Error) {
	if err := f.enter("GetUnitProcesses", unit); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.processes[unit], nil
}

func (f fakeManagerMethods) RefUnit(sender dbus.Sender, unit string) *dbus.Error {
	if err := f.enter("RefUnit", unit); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if u, ok := f.units[unit]; !ok || u["LoadState"].Value() != "loaded" {
		return dbusError(noSuchUnit)
	}
	f.refs[unit]++
	return nil
}

func (f fakeManagerMethods) UnrefUnit(unit string) *dbus.Error {
	if err := f.enter("UnrefUnit", unit); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refs[unit]--
	f.unreferred <- unit
	return nil
}

func (f fakeManagerMethods) StartUnit(unit, mode string) (dbus.ObjectPath, *dbus.Error) {
	return f.queue("StartUnit", unit, mode)
}

func (f fakeManagerMethods) StopUnit(unit, mode string) (dbus.ObjectPath, *dbus.Error) {
	return f.queue("StopUnit", unit, mode)
}

func (f fakeManagerMethods) queue(method, unit, mode string) (dbus.ObjectPath, *dbus.Error) {
	if mode != "replace" {
		f.t.Errorf("%s %s: mode %q", method, unit, mode)
	}
	if err := f.enter(method, unit); err != nil {
		return "/", err
	}
	job := f.nextJob()
	f.removeJob(job, unit, "done")
	return job, nil
}

// StartTransientUnit lets JobRemoved overtake its reply, as systemd can.
func (f fakeManagerMethods) StartTransientUnit(unit, mode string, p []fakeProperty, aux []fakeAuxiliary) (dbus.ObjectPath, *dbus.Error) {
	if err := f.enter("StartTransientUnit", unit); err != nil {
		return "/", err
	}
	f.mu.Lock()
	f.transient = map[string]dbus.Variant{}
	for _, p := range p {
		f.transient[p.Name] = p.Value
	}
	f.refs[unit]++ // AddRef
	f.mu.Unlock()
	job := f.nextJob()
	f.removeJob("/org/freedesktop/systemd1/job/999999", unit, "canceled") // of another job
	f.removeJob(job, unit, "failed")
	return job, nil
}

func newTestSystemd(t *testing.T) (*systemd, *fakeManager, *testBus) {
	t.Helper()
	bus := startBus(t, "unix:path="+filepath.Join(t.TempDir(), "bus"))
	return newSystemd(bus.address), newFakeManager(t, bus), bus
}

func dbusError(name string) *dbus.Error {
	return dbus.NewError(name, []any{"text that decides nothing"})
}

// wait fails a test that would hang.
func wait[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(20 * time.Second):
		t.Fatalf("no %s", what)
		panic("unreachable")
	}
}

func TestSystemdUnit(t *testing.T) {
	s, f, _ := newTestSystemd(t)
	f.setUnit("app.service", fakeUnit(map[string]any{
		"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "Result": "success",
		"Job":          fakeJob{7, "/org/freedesktop/systemd1/job/7"},
		"InvocationID": []byte{0x0a, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff},
		"NRestarts":    uint32(3), "MainPID": uint32(4499), "ControlGroup": "/user.slice/app.service",
		"SourcePath": "/home/toad/app.container", "FragmentPath": "/run/user/1001/systemd/generator/app.service",
		"NeedDaemonReload": true,
		"ExecStart":        []fakeCommand{{Path: "/bin/true", Argv: []string{"true"}}, {Path: "/usr/bin/podman", Argv: []string{"podman", "run", "x@sha256:1"}}},
		"WantedBy":         []string{"default.target"}, "BoundBy": []string{"b.service"}, "TriggeredBy": []string{"app.timer"},
		"RequiredBy": []string{"b.service"}, "RequisiteOf": []string{"q.service"}, "ConsistsOf": []string{"c.service"}, "UpheldBy": []string{"u.service"},
	}))
	got, err := s.Unit(t.Context(), "app.service")
	if err != nil {
		t.Fatal(err)
	}
	want := unitStatus{
		LoadState: "loaded", ActiveState: "active", SubState: "running", Result: "success", Job: 7,
		InvocationID: "0a0102030405060708090a0b0c0d0eff", NRestarts: 3, MainPID: 4499,
		ControlGroup: "/user.slice/app.service", SourcePath: "/home/toad/app.container",
		FragmentPath: "/run/user/1001/systemd/generator/app.service", NeedDaemonReload: true,
		ExecStart:  []string{"podman", "run", "x@sha256:1"},
		Dependents: []string{"app.timer", "b.service", "c.service", "default.target", "q.service", "u.service"},
	}
	if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}

	got, err = s.Unit(t.Context(), "none.service")
	if err != nil || got.LoadState != "not-found" || got.InvocationID != "" || !got.stopped() {
		t.Errorf("a unit without a file: %+v, %v", got, err)
	}

	f.setUnit("zero.service", fakeUnit(map[string]any{"InvocationID": make([]byte, 16)}))
	f.setUnit("odd.service", fakeUnit(map[string]any{"NRestarts": "many"}))
	poor := fakeUnit(nil)
	delete(poor, "NRestarts")
	f.setUnit("poor.service", poor)
	if got, err := s.Unit(t.Context(), "zero.service"); err != nil || got.InvocationID != "" {
		t.Errorf("an invocation of zeros: %+v, %v", got, err)
	}
	for _, name := range []string{"odd.service", "poor.service"} {
		if got, err := s.Unit(t.Context(), name); err == nil || errors.Is(err, errNotFound) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

func TestSystemdUnitVanishes(t *testing.T) {
	for short, name := range map[string]string{"unit": noSuchUnit, "object": unknownObject} { // a socket's path is short
		t.Run(short, func(t *testing.T) {
			s, f, _ := newTestSystemd(t)
			f.setUnit("app.service", fakeUnit(map[string]any{"LoadState": "loaded"}))
			var left atomic.Int32
			f.setBefore(func(method, unit string) *dbus.Error {
				if method == "GetAll" && left.Add(-1) >= 0 {
					return dbusError(name)
				}
				return nil
			})
			left.Store(1)
			u, err := s.Unit(t.Context(), "app.service")
			if err != nil || u.LoadState != "loaded" {
				t.Errorf("collected once: %+v, %v", u, err)
			}
			left.Store(2)
			u, err = s.Unit(t.Context(), "app.service")
			if err != nil || u.LoadState != "not-found" || u.stopped() {
				t.Errorf("collected twice: %+v, %v", u, err)
			}
			f.setBefore(func(method, unit string) *dbus.Error { return dbusError("org.freedesktop.DBus.Error.AccessDenied") })
			if u, err := s.Unit(t.Context(), "app.service"); err == nil {
				t.Errorf("another error: %+v", u)
			}
		})
	}
}

func TestSystemdProcesses(t *testing.T) {
	s, f, _ := newTestSystemd(t)
	f.mu.Lock()
	f.processes["app.service"] = []fakeProcess{{"/a", 7160, "[tapp]"}, {"/a/b", 7161, "conmon -c x"}}
	f.mu.Unlock()
	got, err := s.Processes(t.Context(), "app.service")
	if err != nil || !slices.Equal(got, []string{"7160 [tapp]", "7161 conmon -c x"}) {
		t.Errorf("got %q, %v", got, err)
	}
	f.setBefore(func(method, unit string) *dbus.Error { return dbusError(noSuchUnit) })
	if got, err := s.Processes(t.Context(), "app.service"); err != nil || len(got) != 0 {
		t.Errorf("not loaded: %q, %v", got, err)
	}
	f.setBefore(func(method, unit string) *dbus.Error { return dbusError("org.freedesktop.DBus.Error.Failed") })
	if got, err := s.Processes(t.Context(), "app.service"); err == nil {
		t.Errorf("failed: %q", got)
	}
}

func TestSystemdJobs(t *testing.T) {
	s, f, _ := newTestSystemd(t)
	if err := s.Start(t.Context(), "app.service"); err != nil {
		t.Error(err)
	}
	if err := s.Stop(t.Context(), "app.service"); err != nil {
		t.Error(err)
	}
	if err := s.ResetFailed(t.Context(), "app.service"); err != nil {
		t.Error(err)
	}
	if err := s.Reload(t.Context()); err != nil {
		t.Error(err)
	}
	if got, err := s.Incarnation(t.Context()); err != nil || got != "12345678901" {
		t.Errorf("incarnation %q, %v", got, err)
	}
	want := []string{"Subscribe", "StartUnit app.service", "StopUnit app.service", "ResetFailedUnit app.service", "Reload", "Get UserspaceTimestampMonotonic"}
	f.mu.Lock()
	if !slices.Equal(f.calls, want) {
		t.Errorf("calls %q", f.calls)
	}
	f.mu.Unlock()

	f.setBefore(func(method, unit string) *dbus.Error { return dbusError(noSuchUnit) })
	if err := s.Start(t.Context(), "app.service"); !errors.Is(err, errNotFound) {
		t.Errorf("start without a file: %v", err)
	}
	if err := s.Stop(t.Context(), "app.service"); !errors.Is(err, errNotFound) {
		t.Errorf("stop without a file: %v", err)
	}
	if err := s.ResetFailed(t.Context(), "app.service"); err != nil {
		t.Errorf("reset of an unloaded unit: %v", err)
	}
	f.setBefore(func(method, unit string) *dbus.Error { return dbusError("org.freedesktop.systemd1.BadUnitSetting") })
	err := s.Start(t.Context(), "app.service")
	if err == nil || errors.Is(err, errNotFound) || !strings.Contains(err.Error(), "BadUnitSetting") {
		t.Errorf("start of a bad unit: %v", err)
	}
}

func TestSystemdHold(t *testing.T) {
	s, f, _ := newTestSystemd(t)
	first, releaseFirst, err := s.Hold(t.Context(), "app.service")
	if err != nil {
		t.Fatal(err)
	}
	second, releaseSecond, err := s.Hold(t.Context(), "app.service")
	if err != nil {
		t.Fatal(err)
	}
	if n := f.references("app.service"); n != 1 {
		t.Errorf("%d references", n)
	}

	// What was sent before a reply is delivered before it.
	flush := func() {
		t.Helper()
		if _, err := s.Incarnation(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	f.changeUnit("app.service", "active", "running", 9) // its service half was sent before the match
	flush()
	wait(t, first.C, "token")
	if seen := first.take(); len(seen) != 0 {
		t.Errorf("half a change was put: %+v", seen)
	}

	f.changeService("app.service", 1)
	flush()
	if len(first.C) != 0 {
		t.Error("the service half alone woke the reader")
	}
	f.changeUnit("app.service", "activating", "start", 1)
	f.change("app.service", 1, "active", "running", 1)
	f.change("app.service", 1, "active", "running", 1) // systemd repeats itself
	f.change("app.service", 1, "failed", "failed", 1)
	f.change("other.service", 5, "failed", "failed", 1)
	flush()
	id := strings.Repeat("01", 16)
	want := []unitStatus{
		{ActiveState: "activating", SubState: "start", InvocationID: id, NRestarts: 1, MainPID: 101},
		{ActiveState: "active", SubState: "running", InvocationID: id, NRestarts: 1, MainPID: 101},
		{ActiveState: "failed", SubState: "failed", InvocationID: id, NRestarts: 1, MainPID: 101},
	}
	for _, r := range []*unitSignals{first, second} {
		wait(t, r.C, "token")
		if got := r.take(); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
	}

	releaseFirst()
	releaseFirst()
	f.change("app.service", 2, "active", "running", 2)
	flush()
	if len(first.take()) != 0 || len(second.take()) != 1 {
		t.Error("released signals still come, or held ones no more")
	}
	if n := f.references("app.service"); n != 1 {
		t.Errorf("%d references while one holds", n)
	}
	releaseSecond()
	wait(t, f.unreferred, "UnrefUnit")
	if n := f.references("app.service"); n != 0 {
		t.Errorf("%d references when nobody holds", n)
	}
	if len(s.held) != 0 {
		t.Errorf("still held: %v", s.held)
	}
}

// A service's first deployment holds its unit before there is a file, and a file can go.
func TestSystemdHoldBeforeLoaded(t *testing.T) {
	s, f, _ := newTestSystemd(t)
	f.setUnit("new.service", fakeUnit(nil))
	look := func() {
		t.Helper()
		if _, err := s.Unit(t.Context(), "new.service"); err != nil {
			t.Error(err)
		}
	}
	_, release, err := s.Hold(t.Context(), "new.service")
	if err != nil {
		t.Fatal(err)
	}
	release()
	signals, release, err := s.Hold(t.Context(), "new.service")
	if err != nil {
		t.Fatal(err)
	}
	look()
	if n := f.references("new.service"); n != 0 {
		t.Errorf("%d references before it is loaded", n)
	}
	f.setUnit("new.service", fakeUnit(map[string]any{"LoadState": "loaded"}))
	look()
	look()
	if n := f.references("new.service"); n != 1 {
		t.Errorf("%d references", n)
	}
	f.change("new.service", 0, "active", "running", 1)
	look()
	if seen := signals.take(); len(seen) != 1 {
		t.Errorf("seen %+v", seen)
	}
	release()
	wait(t, f.unreferred, "UnrefUnit")
	if n := f.references("new.service"); n != 0 {
		t.Errorf("%d references left", n)
	}
	if n := f.count("UnrefUnit new.service"); n != 1 {
		t.Errorf("given back %d times", n)
	}

	f.setBefore(func(method, unit string) *dbus.Error {
		if method == "RefUnit" {
			return dbusError("org.freedesktop.DBus.Error.AccessDenied")
		}
		return nil
	})
	if _, _, err := s.Hold(t.Context(), "new.service"); err == nil {
		t.Error("a refusal for another reason passed for a hold")
	}
}

func TestSystemdRun(t *testing.T) {
	unit := func(result string, code, status int32) map[string]dbus.Variant {
		return fakeUnit(map[string]any{"LoadState": "loaded", "Result": result, "ExecMainCode": code, "ExecMainStatus": status})
	}
	tests := []struct {
		name string
		unit map[string]dbus.Variant
		ok   bool
		err  string // part of it, "" for none
	}{
		{"success", unit("success", 1, 0), true, ""},
		{"exit status 3", unit("exit-code", 1, 3), false, ""},
		{"no such program", unit("exit-code", 1, 203), false, "could not be executed"},
		{"killed", unit("signal", 2, 9), false, "ended as signal"},
		{"too long", unit("timeout", 2, 15), false, "ended as timeout"},
		{"never ran", fakeUnit(nil), false, "no exit status"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s, f, _ := newTestSystemd(t)
			f.setUnit("toad-run.service", tt.unit)
			ok, err := s.Run(t.Context(), "toad-run.service", []string{"/bin/x", "--y"}, []string{"A=b"}, "/data/out")
			if ok != tt.ok || tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("got %v, %v, want %v, %q", ok, err, tt.ok, tt.err)
			}
			wait(t, f.unreferred, "UnrefUnit")
			if n := f.references("toad-run.service"); n != 0 {
				t.Errorf("%d references left", n)
			}
			if len(s.runs) != 0 {
				t.Errorf("left behind: %v", s.runs)
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			for name, want := range map[string]string{
				"Type": `"oneshot"`, "CollectMode": `"inactive-or-failed"`, "AddRef": "true", "Environment": `["A=b"]`,
				"ExecStartEx":                  `[["/bin/x", ["/bin/x", "--y"], ["no-env-expand"]]]`,
				"StandardOutputFileToTruncate": `"/data/out"`, "StandardErrorFileToTruncate": `"/data/out"`,
				"TimeoutStartUSec": "@t 50000000", "TimeoutStartFailureMode": `"kill"`,
			} {
				if got := f.transient[name].String(); got != want {
					t.Errorf("%s is %s, want %s", name, got, want)
				}
			}
		})
	}
}

func TestSystemdRunAfterDeadPredecessor(t *testing.T) {
	s, f, _ := newTestSystemd(t)
	f.setUnit("toad-run.service", fakeUnit(map[string]any{"Result": "success", "ExecMainCode": int32(1)}))
	for _, collected := range []bool{false, true} { // before it could be stopped
		var stopped atomic.Bool
		f.setBefore(func(method, unit string) *dbus.Error {
			switch {
			case method == "StartTransientUnit" && !stopped.Load():
				return dbusError(unitExists)
			case method == "StopUnit":
				stopped.Store(true)
				if collected {
					return dbusError(noSuchUnit)
				}
			}
			return nil
		})
		if ok, err := s.Run(t.Context(), "toad-run.service", []string{"/bin/x"}, nil, "/data/out"); !ok || err != nil {
			t.Errorf("collected %v: %v, %v", collected, ok, err)
		}
	}

	f.setBefore(func(method, unit string) *dbus.Error {
		if method == "StartTransientUnit" {
			return dbusError(unitExists)
		}
		return nil
	})
	_, err := s.Run(t.Context(), "toad-run.service", []string{"/bin/x"}, nil, "/data/out")
	if !isError(err, unitExists) {
		t.Errorf("a unit that does not go away: %v", err)
	}
}

func TestSystemdRunTwiceAtOnce(t *testing.T) {
	s, f, _ := newTestSystemd(t)
	f.setUnit("toad-run.service", fakeUnit(map[string]any{"Result": "success", "ExecMainCode": int32(1)}))
	started, goOn := make(chan struct{}), make(chan struct{})
	f.setBefore(func(method, unit string) *dbus.Error {
		if method == "StartTransientUnit" {
			close(started)
			<-goOn
		}
		return nil
	})
	ended := make(chan error, 1)
	go func() {
		_, err := s.Run(t.Context(), "toad-run.service", []string{"/bin/x"}, nil, "/data/out")
		ended <- err
	}()
	wait(t, started, "StartTransientUnit")
	if _, err := s.Run(t.Context(), "toad-run.service", []string{"/bin/x"}, nil, "/data/out"); err == nil {
		t.Error("the second ran too")
	}
	close(goOn)
	if err := wait(t, ended, "end"); err != nil {
		t.Error(err)
	}
}

// everyMethod calls each method once.
func everyMethod(s *systemd, ctx context.Context) map[string]func() error {
	return map[string]func() error{
		"Unit":        func() error { _, err := s.Unit(ctx, "app.service"); return err },
		"Processes":   func() error { _, err := s.Processes(ctx, "app.service"); return err },
		"Start":       func() error { return s.Start(ctx, "app.service") },
		"Stop":        func() error { return s.Stop(ctx, "app.service") },
		"Reload":      func() error { return s.Reload(ctx) },
		"ResetFailed": func() error { return s.ResetFailed(ctx, "app.service") },
		"Run": func() error {
			_, err := s.Run(ctx, "toad-run.service", []string{"/bin/x"}, nil, "/data/out")
			return err
		},
		"Incarnation": func() error { _, err := s.Incarnation(ctx); return err },
		"Hold": func() error {
			_, release, err := s.Hold(ctx, "app.service")
			if err == nil {
				release()
			}
			return err
		},
	}
}

func TestSystemdHungManager(t *testing.T) {
	s, f, _ := newTestSystemd(t)
	f.setUnit("toad-run.service", fakeUnit(map[string]any{"Result": "success", "ExecMainCode": int32(1)}))
	thawed := make(chan struct{})
	hang := func(method, unit string) *dbus.Error { <-thawed; return nil }

	f.setBefore(hang)
	s.timeout, s.reloadTimeout, s.runTimeout = 50*time.Millisecond, 50*time.Millisecond, 50*time.Millisecond
	for name, method := range everyMethod(s, t.Context()) { // not even Subscribe is answered
		if err := method(); !errors.Is(err, errNoAnswer) {
			t.Errorf("%s before there is a connection: %v", name, err)
		}
	}
	f.setBefore(nil)
	if _, err := s.Incarnation(t.Context()); err != nil {
		t.Fatal(err)
	}
	conn := s.conn

	f.setBefore(hang)
	for name, method := range everyMethod(s, t.Context()) {
		if err := method(); !errors.Is(err, errNoAnswer) {
			t.Errorf("%s: %v", name, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.timeout, s.reloadTimeout, s.runTimeout = time.Minute, time.Minute, time.Minute
	for name, method := range everyMethod(s, ctx) {
		if err := method(); !errors.Is(err, context.Canceled) {
			t.Errorf("%s, cancelled: %v", name, err)
		}
	}

	close(thawed) // the late answers come now
	f.setBefore(nil)
	for name, method := range everyMethod(s, t.Context()) {
		if err := method(); err != nil {
			t.Errorf("%s afterwards: %v", name, err)
		}
	}
	if s.conn != conn {
		t.Error("a call that timed out made a new connection")
	}
}

func TestSystemdFrozenBus(t *testing.T) {
	s, f, bus := newTestSystemd(t)
	s.timeout = time.Second
	if _, err := s.Incarnation(t.Context()); err != nil {
		t.Fatal(err)
	}
	thaw := bus.freeze(t)
	defer thaw()
	fresh := newSystemd(bus.address)
	fresh.timeout = 50 * time.Millisecond
	if _, err := fresh.Incarnation(t.Context()); !errors.Is(err, errNoAnswer) {
		t.Errorf("connecting to a frozen bus: %v", err)
	}
	s.mu.Lock()
	conn := s.conn
	s.mu.Unlock()
	if err := s.ResetFailed(t.Context(), strings.Repeat("x", 8<<20)+".service"); err == nil { // more than the socket buffers
		t.Error("a frozen bus took a message")
	}
	wait(t, conn.Context().Done(), "end of the connection")
	thaw()
	if _, err := s.Incarnation(t.Context()); err != nil {
		t.Error(err)
	}
	if n := f.count("Subscribe"); n != 2 {
		t.Errorf("subscribed %d times", n)
	}
}

func TestSystemdBusRestart(t *testing.T) {
	s, f, bus := newTestSystemd(t)
	f.setUnit("gone.service", fakeUnit(map[string]any{"LoadState": "loaded"}))
	signals, release, err := s.Hold(t.Context(), "app.service")
	if err != nil {
		t.Fatal(err)
	}
	_, releaseGone, err := s.Hold(t.Context(), "gone.service")
	if err != nil {
		t.Fatal(err)
	}
	f.change("app.service", 1, "active", "running", 1)
	wait(t, signals.C, "signal")
	signals.take()

	bus.kill()
	wait(t, signals.C, "token for the lost connection")
	if _, err := s.Unit(t.Context(), "app.service"); !errors.Is(err, errBusGone) {
		t.Errorf("without a bus: %v", err)
	}

	f.setUnit("gone.service", fakeUnit(nil)) // its file went while the bus was away
	f.mu.Lock()
	clear(f.refs) // systemd drops those of a connection that ended
	f.mu.Unlock()
	f.attach(startBus(t, bus.address))
	if _, err := s.Unit(t.Context(), "app.service"); err != nil {
		t.Fatal(err)
	}
	wait(t, signals.C, "token for the new connection")
	if n := f.count("Subscribe"); n != 2 {
		t.Errorf("subscribed %d times", n)
	}
	if n := f.references("app.service"); n != 1 {
		t.Errorf("%d references", n)
	}
	f.changeUnit("app.service", "active", "running", 8) // half a change, on the new connection
	f.change("app.service", 2, "active", "running", 2)
	if _, err := s.Incarnation(t.Context()); err != nil {
		t.Fatal(err)
	}
	if seen := signals.take(); len(seen) != 1 || seen[0].NRestarts != 2 {
		t.Errorf("seen %+v", seen)
	}
	f.setUnit("gone.service", fakeUnit(map[string]any{"LoadState": "loaded"})) // and comes back
	if _, err := s.Unit(t.Context(), "gone.service"); err != nil {
		t.Fatal(err)
	}
	if n := f.references("gone.service"); n != 1 {
		t.Errorf("%d references to what came back", n)
	}
	release()
	releaseGone()
	wait(t, f.unreferred, "UnrefUnit")
	wait(t, f.unreferred, "UnrefUnit")
}

// A connection that never was is no bus that is gone for good.
func TestSystemdBusWithoutManager(t *testing.T) {
	bus := startBus(t, "unix:path="+filepath.Join(t.TempDir(), "bus"))
	s := newSystemd(bus.address)
	if err := s.Start(t.Context(), "app.service"); err == nil || errors.Is(err, errBusGone) || errors.Is(err, errNotFound) {
		t.Errorf("without a manager: %v", err)
	}
	newFakeManager(t, bus)
	if err := s.Start(t.Context(), "app.service"); err != nil {
		t.Error(err)
	}
	if err := newSystemd("unix:path=" + filepath.Join(t.TempDir(), "none")).Reload(t.Context()); !errors.Is(err, errBusGone) {
		t.Errorf("without a socket: %v", err)
	}
}

// Case E5: nobody reads the signals of 1,000 jobs, nor a held unit's.
func TestSystemdUnreadSignals(t *testing.T) {
	s, f, _ := newTestSystemd(t)
	signals, release, err := s.Hold(t.Context(), "app.service")
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	for i := range 1000 {
		if err := s.Start(t.Context(), "app.service"); err != nil {
			t.Fatal(err)
		}
		for j := range 5 {
			f.change("app.service", uint32(5*i+j), "active", "running", 1)
		}
		if err := s.Stop(t.Context(), "app.service"); err != nil {
			t.Fatal(err)
		}
	}
	seen := signals.take()
	if len(seen) == 0 || len(seen) > 4096 || seen[len(seen)-1].NRestarts != 4999 {
		t.Errorf("%d signals kept", len(seen))
	}
	if !slices.IsSortedFunc(seen, func(a, b unitStatus) int { return int(a.NRestarts) - int(b.NRestarts) }) {
		t.Error("signals out of order")
	}
}

func TestSystemdConcurrentCalls(t *testing.T) {
	s, f, _ := newTestSystemd(t)
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			for _, method := range []string{"Hold", "Unit", "Start", "Processes", "Stop"} {
				if err := everyMethod(s, t.Context())[method](); err != nil {
					t.Errorf("%s: %v", method, err)
				}
			}
		})
	}
	all.Wait()
	if n := f.count("Subscribe"); n != 1 {
		t.Errorf("subscribed %d times", n)
	}
}

// Case E6: what godbus says to authenticate must hold in a rootless container, where the process
// takes itself for another user than the bus sees.
func TestSystemdAuthenticatesWithoutAName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bus")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	lines := make(chan string, 2)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		r := bufio.NewReader(c)
		line, _ := r.ReadString('\n')
		lines <- line
		fmt.Fprint(c, "REJECTED EXTERNAL\r\n")
		line, _ = r.ReadString('\n')
		lines <- line
	}()
	if err := newSystemd("unix:path=" + path).Reload(t.Context()); err == nil || errors.Is(err, errBusGone) {
		t.Errorf("a bus that hangs up: %v", err)
	}
	for _, want := range []string{"\x00AUTH\r\n", "AUTH EXTERNAL\r\n"} {
		if got := wait(t, lines, "line"); got != want {
			t.Errorf("sent %q, want %q", got, want)
		}
	}
}
