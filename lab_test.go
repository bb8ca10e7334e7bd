package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gofrs/flock"
)

// The lab: a real Debian with systemd, rootless Podman, Quadlet and a registry (testdata/lab). Tests
// that need it begin with theLab. They fail without it, and are left out only by -short.
//
// Tests of one service each run in parallel; whoever kills Toad, prunes, stops the registry or boots the
// host does not call t.Parallel and has the lab to itself.
type lab struct {
	name string
	http *http.Client
}

var startLab = sync.OnceValues(func() (*lab, error) {
	l := &lab{name: os.Getenv("TOAD_LAB_NAME")}
	if l.name == "" {
		l.name = "toad-test"
	}
	l.http = &http.Client{Transport: describedTransport{&http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", l.path("/home/toad/.local/share/toad/run/toad.sock"))
	}}}}
	// Two runs in one lab would each undo what the other does.
	if err := os.MkdirAll(labDir(), 0o755); err != nil {
		return nil, err
	}
	busy := flock.New(filepath.Join(labDir(), l.name+".test.lock"))
	if ok, err := busy.TryLock(); err != nil {
		return nil, err
	} else if !ok {
		return nil, fmt.Errorf("another test run is in the lab %s; TOAD_LAB_NAME names another lab", l.name)
	}
	// A run begins with an empty Toad: what an earlier one left is no part of it.
	for _, args := range [][]string{{"up"}, {"exec", "sh", "-c", wipe}, {"install"}} {
		if out, err := l.lab(args...).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("lab %s: %w\n%s", args[0], err, out)
		}
	}
	return l, nil
})

// wipe removes every enrolled service's instance, unit, enrollment and record.
const wipe = `systemctl --user stop toad.service 2>/dev/null
for d in ~/.config/containers/systemd/*/; do
  case $d in */_infra/) continue;; esac
  for u in "$d"*.container; do [ -e "$u" ] && systemctl --user stop "$(basename "$u" .container).service"; done
  rm -rf "$d"
done
rm -rf ~/.config/toad/enrollment/* ~/.config/containers/systemd/.toad.lock
podman unshare rm -rf ~/.local/share/toad
systemctl --user daemon-reload; systemctl --user reset-failed; true`

func theLab(t testing.TB) *lab {
	t.Helper()
	if testing.Short() {
		t.Skip("this test needs the lab: run without -short")
	}
	l, err := startLab()
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *lab) lab(args ...string) *exec.Cmd {
	return exec.Command(filepath.Join("testdata", "lab", "lab"), append([]string{"--name", l.name}, args...)...)
}

func labDir() string {
	if dir := os.Getenv("TOAD_LAB_DIR"); dir != "" {
		return dir
	}
	return "/var/lib/toad-lab"
}

// path is a path of the lab's host as seen from outside.
func (l *lab) path(p string) string {
	b, _ := os.ReadFile(filepath.Join(labDir(), l.name, "pid"))
	return "/proc/" + strings.TrimSpace(string(b)) + "/root" + p
}

// inside is a command on the host, as `lab exec` runs it, without what that does for signals and terminals:
// the tests run thousands, and with it each would cost ten times as much.
func (l *lab) inside(args ...string) *exec.Cmd {
	b, _ := os.ReadFile(filepath.Join(labDir(), l.name, "pid"))
	as := []string{"--target", strings.TrimSpace(string(b)), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup",
		"setpriv", "--reuid", "1001", "--regid", "1001", "--init-groups", "--pdeathsig", "KILL", "env", "-i", "--chdir=/home/toad",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TERM=dumb", "LANG=C.UTF-8",
		"HOME=/home/toad", "USER=toad", "XDG_RUNTIME_DIR=/run/user/1001", "DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/1001/bus"}
	if args[0] == "--root" {
		i, j := slices.Index(as, "--reuid"), slices.Index(as, "--pdeathsig")
		as, args = slices.Delete(as, i, j), args[1:]
		as = append(as[:slices.Index(as, "HOME=/home/toad")], "HOME=/root", "USER=root")
		as[slices.Index(as, "--chdir=/home/toad")] = "--chdir=/"
	}
	cmd := exec.Command("nsenter", append(as, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	return cmd
}

// output runs a command of inside's in a cgroup of the lab's, to which it then belongs.
func (l *lab) output(cmd *exec.Cmd) ([]byte, error) {
	mounts, err := os.ReadFile("/proc/mounts")
	if err != nil {
		return nil, err
	}
	m := regexp.MustCompile(`(?m)^\S+ (\S+) cgroup2 `).FindSubmatch(mounts)
	if m == nil {
		return nil, errors.New("there is no cgroup2: lab up mounts one")
	}
	dir := filepath.Join(string(m[1]), "toad-lab-"+l.name, "exec")
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(f.Fd())
	return cmd.CombinedOutput()
}

// try runs a command on the host as the toad user and returns its output and exit status.
func (l *lab) try(args ...string) (string, int) {
	cmd := l.inside(args...)
	out, err := l.output(cmd)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return err.Error(), -1
	}
	return strings.TrimSpace(string(out)), cmd.ProcessState.ExitCode()
}

// sound demands that fsck finds nothing in the records and the unit of these services. (Units of services that
// other tests had are gone.)
func (l *lab) sound(t testing.TB, services ...string) {
	t.Helper()
	out, status := l.try("toad", "fsck")
	if status != 0 && status != 1 {
		t.Errorf("fsck exits %d: %s", status, out)
	}
	for line := range strings.Lines(out) {
		for _, s := range services {
			if strings.Contains(line, "/"+s+"/") {
				t.Errorf("fsck: %s", line)
			}
		}
	}
}

// exec runs a shell line on the host as the toad user, root as root; it must succeed.
func (l *lab) exec(t testing.TB, line string) string {
	t.Helper()
	out, status := l.try("sh", "-c", line)
	if status != 0 {
		t.Fatalf("%s: exit %d\n%s", line, status, out)
	}
	return out
}

func (l *lab) root(t testing.TB, line string) string {
	t.Helper()
	out, status := l.try("--root", "sh", "-c", line)
	if status != 0 {
		t.Fatalf("as root: %s: exit %d\n%s", line, status, out)
	}
	return out
}

// write writes a file of the toad user's.
func (l *lab) write(t testing.TB, path, text string) {
	t.Helper()
	cmd := l.inside("sh", "-c", `mkdir -p "$(dirname "$1")" && cat > "$1.new" && mv "$1.new" "$1"`, "sh", path)
	cmd.Stdin = strings.NewReader(text)
	if out, err := l.output(cmd); err != nil {
		t.Fatalf("writing %s: %v\n%s", path, err, out)
	}
}

// image makes an image of the test workload with that environment, pushes it, and returns its reference.
func (l *lab) image(t testing.TB, repository string, env ...string) string {
	t.Helper()
	out, err := l.lab(append([]string{"image", "apps/" + repository}, env...)...).Output()
	if err != nil {
		t.Fatalf("making an image: %v", err)
	}
	return strings.TrimSpace(string(out))
}

// labService is one service enrolled for one test.
type labService struct {
	*lab
	t    testing.TB
	name string
	en   enrollment
	tmpl string
	keys int
}

// enroll enrolls a service of that name with short deadlines; change may alter both files. The test's
// end removes it from the host.
func (l *lab) enroll(t testing.TB, name string, change ...func(s *labService)) *labService {
	t.Helper()
	s := &labService{lab: l, t: t, name: name, en: enrollment{
		Version: 1, Service: name, Unit: name + ".container", Repository: "registry.lab:5000/apps/" + name, ImageLimit: 64 << 20,
		Readiness:     readiness{Port: 8080, Path: "/ready", Network: "apps", Interval: duration(500 * time.Millisecond), Timeout: duration(time.Second)},
		Probation:     probation{RolloutDeadline: duration(time.Minute), StabilityWindow: duration(3 * time.Second), RestartBudget: 1, StartupDeadline: duration(30 * time.Second)},
		FetchDeadline: duration(time.Minute), StopDeadline: duration(12 * time.Second),
	}, tmpl: fmt.Sprintf("[Container]\nContainerName=%s\nNetwork=apps.network\nStopTimeout=2\n\n[Service]\nRestart=always\nTimeoutStopSec=4\n\n[Install]\nWantedBy=default.target\n", name)}
	for _, c := range change {
		c(s)
	}
	s.apply()
	t.Cleanup(func() {
		out, _ := l.try("sh", "-c", fmt.Sprintf(`cd; rm -f .config/toad/enrollment/%[1]s.*; systemctl --user stop %[1]s.service; podman rm -f -t0 -i %[1]s
rm -rf .config/containers/systemd/%[1]s; systemctl --user daemon-reload; systemctl --user reset-failed %[1]s.service 2>/dev/null; true`, name))
		if t.Failed() {
			t.Logf("cleaning up: %s", out)
		}
	})
	return s
}

// apply writes both files as an infrastructure apply does.
func (s *labService) apply() {
	s.t.Helper()
	b, err := json.MarshalIndent(s.en, "", "  ")
	must(s.t, err)
	s.write(s.t, ".config/toad/enrollment/"+s.en.Unit, s.tmpl)
	s.write(s.t, ".config/toad/enrollment/"+s.name+".json", string(b))
}

// image makes an image in the service's own repository.
func (s *labService) image(env ...string) string {
	s.t.Helper()
	return s.lab.image(s.t, s.name, env...)
}

// call speaks to the administration socket; into is filled from a 2xx answer, and the problem of another
// is returned.
func (l *lab) call(method, path string, body, into any) (*problem, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequest(method, "http://toad"+path, r)
	if err != nil {
		return nil, err
	}
	resp, err := l.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		p := &problem{}
		return p, json.NewDecoder(resp.Body).Decode(p)
	}
	return nil, json.NewDecoder(resp.Body).Decode(into)
}

// must calls until the server answers: it may just be starting again.
func (l *lab) mustCall(t testing.TB, method, path string, body, into any) *problem {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(100 * time.Millisecond) { // another process's start: there is nothing to wait on
		p, err := l.call(method, path, body, into)
		if err == nil && (p == nil || p.Code != "state_unavailable" && p.Code != "shutting_down") {
			return p
		}
		if time.Now().After(end) || errors.Is(err, errNotDescribed) {
			t.Fatalf("%s %s: %v %+v", method, path, err, p)
		}
	}
}

// view reads the service's state.
func (s *labService) view() wireService {
	s.t.Helper()
	var v wireService
	if p := s.mustCall(s.t, "GET", "/v1/services/"+s.name, nil, &v); p != nil {
		s.t.Fatalf("reading %s: %+v", s.name, p)
	}
	return v
}

func (s *labService) request(image string) deployRequest {
	s.t.Helper()
	g := s.view().Generation
	s.keys++
	return deployRequest{Service: s.name, Image: image, ExpectedGeneration: &g, IdempotencyKey: fmt.Sprintf("%s-%d-%d", s.name, s.keys, time.Now().UnixNano())}
}

// submit sends a deployment, which must be accepted.
func (s *labService) submit(image string) wireOperation {
	s.t.Helper()
	var op wireOperation
	if p := s.mustCall(s.t, "POST", "/v1/deployments", s.request(image), &op); p != nil {
		s.t.Fatalf("deploying %s: %+v", s.name, p)
	}
	return op
}

// await follows an operation until ok, or to its end.
func (s *labService) await(id string, ok func(op wireOperation) bool) wireOperation {
	s.t.Helper()
	var op wireOperation
	for end := time.Now().Add(3 * time.Minute); ; {
		path := "/v1/operations/" + id
		if op.ID != "" {
			path += "?wait=1&after_state=" + op.State
		}
		if p := s.mustCall(s.t, "GET", path, nil, &op); p != nil {
			s.t.Fatalf("reading operation %s: %+v", id, p)
		}
		if op.Terminal || ok != nil && ok(op) {
			return op
		}
		if time.Now().After(end) {
			s.t.Fatalf("operation %s is still %s", id, op.State)
		}
	}
}

func (s *labService) awaitState(id, state string) wireOperation {
	s.t.Helper()
	op := s.await(id, func(op wireOperation) bool { return op.State == state })
	if op.State != state {
		s.t.Fatalf("operation %s became %s (%+v), not %s", id, op.State, op.Failure, state)
	}
	return op
}

// deploy submits and follows to the end.
func (s *labService) deploy(image string) wireOperation {
	s.t.Helper()
	return s.await(s.submit(image).ID, nil)
}

// promote deploys what must be promoted, and waits until its unit is installed.
func (s *labService) promote(image string) wireOperation {
	s.t.Helper()
	op := s.deploy(image)
	s.expect(op, "promoted", "")
	s.eventually("the unit is installed", func() bool { return s.view().Installed })
	return op
}

func (s *labService) expect(op wireOperation, state, code string) {
	s.t.Helper()
	got := ""
	if op.Failure != nil {
		got = op.Failure.Code
	}
	if op.State != state || got != code {
		s.t.Fatalf("operation ended %s (%+v), want %s (%s)\n%s", op.State, op.Failure, state, code, s.log(op.ID))
	}
}

// log is the operation's log as text.
func (s *labService) log(id string) string {
	req, _ := http.NewRequest("GET", "http://toad/v1/operations/"+id+"/log", nil)
	req.Header.Set("Accept", "text/plain")
	resp, err := s.http.Do(req)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return string(b)
}

// eventually looks at the host until something is so.
func (l *lab) eventuallyFor(t testing.TB, d time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(d); !ok(); time.Sleep(200 * time.Millisecond) { // the host tells nobody: it has to be looked at
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", d, what)
		}
	}
}

func (s *labService) eventually(what string, ok func() bool) {
	s.t.Helper()
	s.eventuallyFor(s.t, 30*time.Second, what, ok)
}

// running is what Podman itself says runs as this service: "image reference" each.
func (s *labService) running() []string {
	s.t.Helper()
	out := s.exec(s.t, `podman ps --no-trunc --format '{{.Image}}' --filter label=toad.service=`+s.name)
	return strings.Fields(out)
}

// expectRuns demands of Podman and systemd that exactly this image runs, or nothing.
func (s *labService) expectRuns(images ...string) {
	s.t.Helper()
	if got := s.running(); !slices.Equal(got, images) {
		s.t.Fatalf("Podman runs %v, want %v", got, images)
	}
	want := "active"
	if len(images) == 0 {
		want = ""
	}
	if got := s.unit("ActiveState"); want != "" && got != want || want == "" && got == "active" {
		s.t.Fatalf("systemd says %s is %s", s.name, got)
	}
}

// unit reads one property from systemctl.
func (s *labService) unit(property string) string {
	s.t.Helper()
	return s.exec(s.t, fmt.Sprintf("systemctl --user show -P %s %s.service", property, s.name))
}

func (s *labService) unitNumber(property string) int {
	s.t.Helper()
	n, err := strconv.Atoi(s.unit(property))
	must(s.t, err)
	return n
}

// unitFile is the unit as it lies in the Quadlet directory; "" if there is none.
func (s *labService) unitFile() string {
	out, _ := s.try("cat", "/home/toad/.config/containers/systemd/"+s.name+"/"+s.en.Unit)
	if strings.HasPrefix(out, "cat:") {
		return ""
	}
	return out
}

// killToad kills the server without a word; systemd starts it again.
func (l *lab) killToad(t testing.TB) {
	t.Helper()
	l.exec(t, "podman kill --signal KILL toad")
}

// reboot resets the host hard; Toad may still be starting when it returns.
func (l *lab) reboot(t testing.TB) {
	t.Helper()
	if out, err := l.lab("reboot").CombinedOutput(); err != nil {
		t.Fatalf("rebooting: %v\n%s", err, out)
	}
}

func TestLabPromotesAfterTheWindow(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "first")
	image := s.image("VERSION=1", "READY_AFTER=2s")
	op := s.promote(image)
	s.expectRuns(image)
	at := map[string]time.Time{}
	for _, x := range op.Timeline {
		at[x.State] = time.Time(x.At)
	}
	if d := at["promoted"].Sub(at["probation"]); d < 5*time.Second || d > 9*time.Second {
		t.Errorf("promoted %s after the start, want 2s of starting and the window of 3s", d)
	}
	if f := s.unitFile(); !strings.Contains(f, "[Install]") || !strings.Contains(f, image) {
		t.Errorf("unit file:\n%s", f)
	}
	second := s.image("VERSION=2")
	s.promote(second)
	s.expectRuns(second)
}
