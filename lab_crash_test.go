package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// The test binary, installed in the lab as /toad, is Toad with a hook at every durable step. The hook
// obeys two files in the data directory: "boundaries" collects the names of the steps, "pause" holds the
// name of one at which the process stands still until it is killed or "paused" is taken away.

// hookedMain is main with that hook.
func hookedMain() {
	if len(os.Args) > 1 && os.Args[1] == "serve" {
		testingOnlyBoundary = labHook
	}
	main()
}

const hookData = "/data/"

var hookNames = regexp.MustCompile(`[0-9a-f]{64}|[0-9a-z]{26}|/[0-9]+\.`)

// labHook names a step by the state and step of the operation under way and the file it concerns.
func labHook(step, path string) error {
	if !strings.Contains(path, "/killed") {
		return nil // another service, or Toad's own
	}
	var r struct {
		Operation *struct {
			State state  `json:"state"`
			Step  string `json:"step"`
		} `json:"operation"`
	}
	if b, err := os.ReadFile(hookData + "services/killed/service.json"); err == nil {
		_ = json.Unmarshal(b, &r)
	}
	name := "none"
	if r.Operation != nil {
		name = strings.TrimSuffix(string(r.Operation.State)+"/"+r.Operation.Step, "/")
	}
	if strings.HasSuffix(path, ".output") {
		name = "beside" // the rollback, in whatever state that is by then
	}
	path = strings.TrimPrefix(strings.TrimPrefix(path, hookData+"services/"), "/quadlet/")
	name += " " + step + " " + hookNames.ReplaceAllStringFunc(path, func(s string) string {
		if s[0] == '/' {
			return "/N."
		}
		return "ID"
	})
	if _, err := os.Stat(hookData + "boundaries"); err == nil {
		if f, err := os.OpenFile(hookData+"boundaries", os.O_APPEND|os.O_WRONLY, 0); err == nil {
			fmt.Fprintln(f, name)
			f.Close()
		}
	}
	if b, err := os.ReadFile(hookData + "pause"); err == nil && strings.TrimSpace(string(b)) == name {
		os.Rename(hookData+"pause", hookData+"paused")
		for _, err := os.Stat(hookData + "paused"); err == nil; _, err = os.Stat(hookData + "paused") {
			time.Sleep(20 * time.Millisecond) // for whoever kills it, or takes the file away
		}
	}
	return nil
}

// hookedBinary builds the test binary once, static.
var hookedBinary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "toad-hooked")
	if err != nil {
		return "", err
	}
	bin := filepath.Join(dir, "toad")
	build := exec.Command("go", "test", "-c", "-o", bin, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building: %w\n%s", err, out)
	}
	return bin, nil
})

// installHooked installs the test binary as Toad; the test's end puts the real one back.
func (l *lab) installHooked(t *testing.T) {
	t.Helper()
	bin, err := hookedBinary()
	if err != nil {
		t.Fatal(err)
	}
	install := func(env ...string) {
		cmd := l.lab("install")
		cmd.Env = append(os.Environ(), env...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("installing: %v\n%s", err, out)
		}
	}
	t.Cleanup(func() { install() })
	install("TOAD_BINARY=" + bin)
}

// tell writes one of the hook's files.
func (l *lab) tell(t testing.TB, file, text string) {
	t.Helper()
	l.write(t, ".local/share/toad/"+file, text)
}

// watchSingleton samples the host from outside, all the time, for two instances of a service: processes
// of the workload in different containers of its unit.
func (l *lab) watchSingleton(t *testing.T, service string) {
	t.Helper()
	stop, done := make(chan struct{}), make(chan struct{})
	samples, two := 0, ""
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(10 * time.Millisecond):
			}
			seen := map[string]bool{}
			procs, _ := filepath.Glob("/proc/[0-9]*/comm")
			for _, p := range procs {
				if b, err := os.ReadFile(p); err != nil || strings.TrimSpace(string(b)) != "tapp" {
					continue
				}
				b, _ := os.ReadFile(filepath.Join(filepath.Dir(p), "cgroup"))
				if m := payload.FindString(string(b)); strings.Contains(string(b), "toad-lab-"+l.name+"/") && strings.Contains(string(b), "/"+service+".service/") {
					seen[m] = true
				}
			}
			samples++
			if len(seen) > 1 {
				two = fmt.Sprint(seen)
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-done
		if two != "" {
			t.Errorf("I1: two instances at once: %s", two)
		}
		if samples < 100 {
			t.Errorf("the host was looked at %d times only", samples)
		}
	})
}

var payload = regexp.MustCompile(`libpod-payload-[0-9a-f]+`)

// interrupted deploys, lets disaster strike while Toad stands still at a durable step, and returns the
// operation's end. The request is sent again under its key, as a client does whose answer was lost. Not
// each deployment comes by each step: a restart is told at once only if none was for a minute. Then another is
// made, of what image says.
func (s *labService) interrupted(at string, image func() string, disaster func()) wireOperation {
	s.t.Helper()
	for try := 1; ; try++ {
		s.exec(s.t, "rm -f .local/share/toad/paused")
		s.tell(s.t, "pause", at)
		req := s.request(image())
		req.IdempotencyKey += fmt.Sprint("-", time.Now().UnixNano())
		go func() { var op wireOperation; _, _ = s.call("POST", "/v1/deployments", req, &op) }()
		stands := func() bool {
			_, err := os.Stat(s.path("/home/toad/.local/share/toad/paused"))
			return err == nil
		}
		for end := time.Now().Add(30 * time.Second); !stands() && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		}
		met := stands()
		if met {
			disaster()
		}
		var op wireOperation
		if p := s.mustCall(s.t, "POST", "/v1/deployments", req, &op); p != nil {
			s.t.Fatalf("asking again: %+v", p)
		}
		if op = s.await(op.ID, nil); met {
			return op
		} else if try == 3 {
			s.t.Fatalf("%d deployments did not come to stand still at %s", try, at)
		}
		time.Sleep(2 * time.Minute) // what was counted meanwhile is told as well
	}
}

func quick(s *labService) {
	s.en.Readiness.Interval = duration(300 * time.Millisecond)
	s.en.Probation.StabilityWindow = duration(1 * time.Second)
	s.en.Probation.StartupDeadline = duration(20 * time.Second)
	s.en.Probation.RolloutDeadline = duration(40 * time.Second)
}

// Toad is killed for real before and after every kind of durable change, in every state, of a deployment
// that is promoted and of one that is rolled back. `go test -run 'TestLabKilled.*/promoted/NAME'` runs one
// of them. -every-boundary has all; else it is the places after the commits of the record, a fifth of them
// each day. What happens between the steps of one write (a temporary file is left) is explored on the in-memory host.
func TestLabKilledAtEachBoundary(t *testing.T) {
	l := theLab(t)
	l.installHooked(t)
	s := l.enroll(t, "killed", quick)
	l.watchSingleton(t, "killed")
	good := []string{s.image("VERSION=1"), s.image("VERSION=2")}
	bad := s.image("VERSION=3", "CRASH=1")
	s.promote(good[0])
	next := func() string { // not what runs, so that it is an upgrade
		if s.view().Current.Image == good[0] {
			return good[1]
		}
		return good[0]
	}

	names := func(deploy func()) []string {
		l.tell(t, "boundaries", "")
		deploy()
		var list []string
		for name := range strings.Lines(l.exec(t, "cat .local/share/toad/boundaries; rm .local/share/toad/boundaries")) {
			if name = strings.TrimSpace(name); !slices.Contains(list, name) {
				list = append(list, name)
			}
		}
		return list
	}
	done := map[string]bool{}
	change := regexp.MustCompile(` syncdir killed$`)
	if *everyBoundary { // before a record is kept and written all that was done to the host is done and not recorded
		change = regexp.MustCompile(``)
	}
	for _, scenario := range []struct {
		name  string
		image func() string
	}{{"promoted", next}, {"rolled_back", func() string { return bad }}} {
		list := names(func() {
			s.expect(s.deploy(scenario.image()), scenario.name, map[string]string{"rolled_back": "restart_budget"}[scenario.name])
			s.eventually("installed", func() bool { return s.view().Installed })
			time.Sleep(time.Second) // what follows from the end is written after it is visible
		})
		if len(list) < 15 {
			t.Fatalf("only %d boundaries: %v", len(list), list)
		}
		for _, name := range list {
			if done[name] || !change.MatchString(name) {
				continue
			}
			if done[name] = true; !today(len(done)) {
				continue
			}
			t.Run(scenario.name+"/"+strings.ReplaceAll(name, "/", "."), func(t *testing.T) {
				s := &labService{lab: s.lab, t: t, name: s.name, en: s.en, tmpl: s.tmpl}
				image, want := scenario.image, ""
				if scenario.name == "promoted" && strings.Contains(name, "/images/") { // both of the others are there
					image = func() string { return s.image(fmt.Sprint("VERSION=", time.Now().UnixNano())) }
				}
				op := s.interrupted(name, func() string {
					want = s.view().Current.Image
					return image()
				}, func() { l.killToad(t) })
				if op.State != scenario.name {
					t.Errorf("ended %s (%+v)\n%s", op.State, op.Failure, s.log(op.ID))
				}
				if op.State == "promoted" {
					want = op.Candidate.Image
				}
				s.eventually("the right one runs, alone", func() bool {
					return slices.Equal(s.running(), []string{want}) && s.view().ActiveOperation == nil
				})
				if v := s.view(); v.Current.Image != want || v.Held != nil {
					t.Errorf("view %+v", v)
				}
			})
		}
	}
	l.sound(t, "killed")
}

const never = -1

// today tells that the place number i is one of this day's fifth; each is with -every-boundary.
func today(i int) bool { return *everyBoundary || (time.Now().YearDay()+i)%5 == 0 }

// inTurn leaves a long test to its day, one of three, or to -every-boundary.
func inTurn(t *testing.T, day int) {
	if !*everyBoundary && time.Now().YearDay()%3 != day {
		t.Skip("not today: with -every-boundary it runs on any day")
	}
}

// The host is reset hard in every state: with -every-boundary in all of them, else in a fifth each day.
func TestLabRebootInEachState(t *testing.T) {
	l := theLab(t)
	l.installHooked(t)
	s := l.enroll(t, "killed", quick, func(s *labService) {
		s.en.Probation.RolloutDeadline = duration(2 * time.Minute)
		s.en.Probation.StartupDeadline = duration(time.Minute)
		s.en.StopDeadline = duration(time.Minute) // it goes on while the host boots
		s.en.FetchDeadline = duration(3 * time.Minute)
	})
	l.watchSingleton(t, "killed")
	good, bad := s.image("VERSION=1"), s.image("VERSION=3", "CRASH=1")
	next := s.image("VERSION=2")
	s.promote(good)
	for i, tt := range []struct {
		at    string // the boundary
		image string
		state string
	}{
		{"preparing syncdir killed", next, "promoted"},
		{"activating/stop syncdir killed", next, "promoted"},
		{"activating/start syncdir killed", next, "promoted"},
		{"probation syncdir killed", next, "promoted"},
		{"promoting syncdir killed", next, "promoted"},
		{"promoted syncdir killed", next, "promoted"},
		{"rolling_back syncdir killed", bad, "rolled_back"},
		{"rolling_back/stop syncdir killed", bad, "rolled_back"},
		{"rolling_back/start syncdir killed", bad, "rolled_back"},
		{"rolling_back/verify syncdir killed", bad, "rolled_back"},
	} {
		if !today(i) {
			continue
		}
		t.Run(strings.ReplaceAll(tt.at, "/", "."), func(t *testing.T) {
			s := &labService{lab: s.lab, t: t, name: s.name, en: s.en, tmpl: s.tmpl}
			before := s.view().Current.Image
			image := tt.image
			if image == before { // alternate, so that each is an upgrade
				image = good
			}
			op := s.interrupted(tt.at, func() string { return image }, func() {
				if out, err := l.lab("reboot").CombinedOutput(); err != nil {
					t.Fatalf("rebooting: %v\n%s", err, out)
				}
			})
			if op.State != tt.state {
				t.Errorf("ended %s (%+v)\n%s", op.State, op.Failure, s.log(op.ID))
			}
			want := before
			if op.State == "promoted" {
				want = image
			}
			s.eventually("the right one runs, alone", func() bool { return slices.Equal(s.running(), []string{want}) })
		})
	}
	l.sound(t, "killed")
}
