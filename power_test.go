package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The test binary is also the whole system of a small virtual machine, whose power is cut while Toad's
// records are written (testdata/lab/powercut). Every service is the real one, on an in-memory host that
// has forgotten everything at each boot, as a real one has; only the disk is a disk. What anybody could
// have been told is printed on the second serial port before anything else is written. After the next
// boot all of it must be true.

const (
	guestDisk     = "/disk"    // the file system on the first disk
	guestAnswers  = "/dev/vdb" // what was printed before, in all boots
	guestPort     = "/dev/ttyS1"
	guestServices = 4
)

// answered is one line of the port: a record as a client could have seen it.
type answered struct {
	Service    string    `json:"service"`
	Operation  string    `json:"operation"`
	Key        string    `json:"key"`
	Hash       string    `json:"hash"`
	Image      string    `json:"image"`
	State      state     `json:"state"`
	Step       string    `json:"step"`
	Candidate  int64     `json:"candidate"`
	Generation int64     `json:"generation"`
	Next       int64     `json:"next"`
	Current    int64     `json:"current"`
	Installed  bool      `json:"installed"`
	Updated    time.Time `json:"updated"`
	Head       eventHead `json:"head"`
}

// guest is the virtual machine's one process. It is the testing.TB of the in-memory host, too.
type guest struct {
	testing.TB
	port     *os.File
	data     *dataDir
	host     *fakeHost
	services []*service

	mu      sync.Mutex
	told    map[string]*record // by service: the record last printed
	answers int
	freeze  int // stand still after that many answers; 0: never
}

func (g *guest) Helper()                        {}
func (g *guest) TempDir() string                { return guestDisk }
func (g *guest) Logf(string, ...any)            {}
func (g *guest) Errorf(format string, a ...any) { g.say("problem "+format, a...) }
func (g *guest) Fatal(a ...any)                 { g.Fatalf("%s", fmt.Sprint(a...)) }
func (g *guest) Fatalf(format string, a ...any) {
	g.Errorf(format, a...)
	g.off()
}

func (g *guest) say(format string, a ...any) {
	// One write a line: what is printed half was not said.
	_, _ = g.port.WriteString(strings.ReplaceAll(fmt.Sprintf(format, a...), "\n", " ") + "\n")
}

// off ends the machine in good order.
func (g *guest) off() {
	unix.Sync()
	time.Sleep(time.Second) // for the port
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
}

// guestMain is init. What the kernel does not know of its command line is in the environment.
func guestMain() {
	g := &guest{told: map[string]*record{}, port: os.Stderr}
	defer g.off()
	defer func() {
		if p := recover(); p != nil {
			g.say("problem panic: %v", p)
			g.say("verdict lost: the check itself failed")
		}
	}()
	if err := g.up(); err != nil {
		g.say("problem booting: %v", err)
		g.say("verdict lost: the disk cannot be used")
		return
	}
	if !g.verify() || os.Getenv("TOAD_CUT_WRITE") == "" {
		return
	}
	_, _ = fmt.Sscan(os.Getenv("TOAD_CUT_FREEZE"), &g.freeze)
	g.work()
}

// up mounts what there is and opens the data directory as the server does.
func (g *guest) up() error {
	for _, m := range []string{"devtmpfs /dev", "proc /proc", "sysfs /sys"} {
		kind, dir, _ := strings.Cut(m, " ")
		if err := unix.Mount(kind, dir, kind, 0, ""); err != nil {
			return fmt.Errorf("mounting %s: %w", dir, err)
		}
	}
	port, err := os.OpenFile(guestPort, os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	g.port = port
	if err := loadModules("/modules"); err != nil {
		return err
	}
	for i := 0; ; i++ { // the disk comes up by itself
		// Nothing but Toad's own syncs may save Toad: no commit of the journal by the clock, and no
		// writing out of a file that is about to replace another.
		err := unix.Mount("/dev/vda", guestDisk, "ext4", 0, "noauto_da_alloc,commit=600")
		if err == nil {
			break
		}
		if i == 100 {
			return fmt.Errorf("mounting %s: %w", guestDisk, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	for file, value := range map[string]string{"dirty_writeback_centisecs": "0", "dirty_expire_centisecs": "60000"} {
		if err := os.WriteFile("/proc/sys/vm/"+file, []byte(value), 0); err != nil {
			return err
		}
	}
	g.host = newFakeHost(g)
	g.host.kernelBoot = fmt.Sprint("boot-", time.Now().UnixNano())
	g.host.data = filepath.Join(guestDisk, "data")
	if err := os.Mkdir(g.host.data, 0o700); err == nil {
		unix.Sync() // the directory is the operator's
	} else if !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// loadModules loads what depends on nothing that is not there yet, until all are loaded.
func loadModules(dir string) error {
	left, err := filepath.Glob(dir + "/*.ko")
	for len(left) > 0 {
		var failed []string
		for _, path := range left {
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			err = unix.FinitModule(int(f.Fd()), "", 0)
			f.Close()
			if err != nil && !errors.Is(err, unix.EEXIST) {
				failed = append(failed, path)
			}
		}
		if len(failed) == len(left) {
			return fmt.Errorf("modules that cannot be loaded: %v", failed)
		}
		left = failed
	}
	return err
}

func guestService(i int) enrolled {
	en := testEnrollment(fmt.Sprint("s", i))
	en.Readiness.Interval = duration(50 * time.Millisecond)
	en.Probation.StabilityWindow = duration(100 * time.Millisecond)
	en.Probation.StartupDeadline = duration(30 * time.Second)
	en.StopDeadline = duration(10 * time.Second)
	return en
}

// verify holds the disk against what was answered, and tells the verdict.
func (g *guest) verify() (ok bool) {
	bad := 0
	problem := func(format string, a ...any) { bad++; g.say("problem "+format, a...) }
	answers, torn := readAnswers()

	// Before Toad touches anything: a temporary file, an event that is in the record and not yet in the
	// log, and a torn last line of the log are legitimate after a cut. Nothing else is.
	begun := time.Now()
	temporary, behind := 0, 0
	_ = filepath.WalkDir(g.host.data, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			problem("%v", err)
		} else if temporaryName.MatchString(e.Name()) || strings.HasSuffix(e.Name(), ".prev.new") {
			temporary++
		}
		return nil
	})
	nobody := func(string) func() { return func() {} }
	raw := &dataDir{path: g.host.data, quadlets: g.host.quadlets}
	if len(answers) > 0 {
		for _, f := range raw.fsck(nobody) {
			switch {
			case filepath.Base(f.File) == "events.jsonl":
				behind++ // what opening cannot mend is found below
			case strings.HasSuffix(f.File, ".prev.new"):
			default:
				problem("fsck before the start: %s: %s", f.File, f.Problem)
			}
		}
	}

	var err error
	if g.data, err = openData(g.host.data, g.host.quadlets); err != nil {
		problem("%v", err)
		g.say("verdict lost")
		return false
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	byName := map[string]*service{}
	underWay := map[state]int{}
	for i := range guestServices {
		en := guestService(i)
		s := newService(en.Service, g.data, g.host.host(), func() (enrolled, error) { return en, nil }, log)
		if err := s.open(); err != nil {
			problem("opening %s: %v", en.Service, err)
			continue
		}
		if op := s.rec.Load().active(); op != nil {
			underWay[op.State]++
		}
		g.services = append(g.services, s)
		byName[en.Service] = s
		g.told[en.Service] = s.rec.Load()
	}
	findings := g.data.fsck(nobody)
	for _, f := range findings {
		problem("fsck: %s: %s", f.File, f.Problem)
	}

	operations, events := map[string]*operation{}, map[string][]string{}
	ended := map[state]int{}
	for i, a := range answers {
		s := byName[a.Service]
		if s == nil {
			problem("answer %d: no service %s", i, a.Service)
			continue
		}
		r := s.rec.Load()
		op, known := operations[a.Operation]
		if !known {
			// As a client does whose answer was lost: the same request under the same key.
			if o, existing, err := s.submit(submission{kind: "deploy", image: a.Image, key: a.Key, hash: a.Hash, actor: "local", expected: -1}); err != nil || !existing || o.ID != a.Operation {
				problem("answer %d: the key of operation %s of %s is lost: %v", i, a.Operation, a.Service, err)
			}
			if op = r.Operation; op == nil || op.ID != a.Operation {
				if op, err = g.data.operation(a.Service, a.Operation); err != nil {
					problem("answer %d: operation %s of %s, accepted and %s, is lost: %v", i, a.Operation, a.Service, a.State, err)
				}
			}
			operations[a.Operation] = op
			if op != nil {
				ended[op.State]++
			}
		}
		if op != nil {
			if op.Key != a.Key || op.RequestHash != a.Hash || op.Candidate.Generation != a.Candidate || op.Candidate.Image != a.Image {
				problem("answer %d: operation %s is another", i, a.Operation)
			}
			if !slices.ContainsFunc(op.Timeline, func(t transition) bool { return t.State == a.State }) {
				problem("answer %d: operation %s of %s was %s, and is %s without having been", i, a.Operation, a.Service, a.State, op.State)
			}
		}
		if r.Generation < a.Generation || r.NextGeneration < a.Next || a.Current > 0 && (r.Current == nil || r.Current.Generation < a.Current) {
			problem("answer %d: %s had generation %d, next %d, current %d; now %d, %d", i, a.Service, a.Generation, a.Next, a.Current, r.Generation, r.NextGeneration)
		}
		if events[a.Service] == nil {
			events[a.Service] = []string{""}
			b, _ := os.ReadFile(g.data.serviceFile(a.Service, "events.jsonl"))
			for line := range strings.Lines(string(b)) {
				var e event
				_ = json.Unmarshal([]byte(line), &e)
				events[a.Service] = append(events[a.Service], e.Hash)
			}
		}
		if ev := events[a.Service]; a.Head.Cursor >= int64(len(ev)) || ev[a.Head.Cursor] != a.Head.Hash {
			problem("answer %d: event %d of %s is lost or another", i, a.Head.Cursor, a.Service)
		}
		last := !slices.ContainsFunc(answers[i+1:], func(b answered) bool { return b.Service == a.Service })
		if last && r.UpdatedAt.Before(a.Updated) {
			now := &operation{}
			if r.Operation != nil {
				now = r.Operation
			}
			problem("answer %d: the record of %s was of %s (%s/%s), and is of %s (%s/%s)", i, a.Service,
				a.Updated.Format(time.StampMilli), a.State, a.Step, r.UpdatedAt.Format(time.StampMilli), now.State, now.Step)
		}
	}
	lines := 0
	for _, ev := range events {
		lines += len(ev) - 1
	}
	verdict := "kept"
	if bad > 0 {
		verdict = "lost"
	}
	g.say("verdict %s: %d problems; %d answers about %d operations (now %v), %d events; at the cut %v under way, %d temporary files, %d event logs behind, %d lines half printed; %.1f s",
		verdict, bad, len(answers), len(operations), ended, lines, underWay, temporary, behind, torn, time.Since(begun).Seconds())
	return bad == 0
}

// readAnswers reads what was printed. A line that the cut tore was not said.
func readAnswers() (list []answered, torn int) {
	b, err := os.ReadFile(guestAnswers)
	if err != nil {
		return nil, 0
	}
	for line := range strings.Lines(strings.TrimRight(string(b), "\x00")) {
		text, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "answered ")
		if !ok {
			continue
		}
		var a answered
		if json.Unmarshal([]byte(text), &a) != nil {
			torn++
			continue
		}
		list = append(list, a)
	}
	return list, torn
}

// work deploys to every service without end.
func (g *guest) work() {
	var images []string
	for i := range 5 {
		images = append(images, g.host.push(testRepository, fmt.Sprint("v", i), app{}))
	}
	crashes := g.host.push(testRepository, "crashes", app{exitAfter: 50 * time.Millisecond})
	g.host.reboot() // what is promoted comes up again
	testingOnlyBoundary = func(string, string) error {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.tell()
		return nil
	}
	g.say("working")
	for i, s := range g.services {
		go s.run(context.Background())
		go func() {
			time.Sleep(time.Duration(i) * 300 * time.Millisecond) // not in step with each other
			for n := 0; ; n++ {
				image := images[(i+n)%len(images)]
				kind := "deploy"
				if (i+n)%3 == 2 {
					image = crashes
				}
				for c := s.changed(); !idle(s); c = s.changed() {
					<-c
				}
				r := s.rec.Load()
				if n%4 == 3 && r.Rollback != nil && !r.Current.ByRollback {
					kind, image = "rollback", ""
				}
				key := fmt.Sprintf("%s-%s-%d", g.host.kernelBoot, s.name, n)
				_, _, err := s.submit(submission{kind: kind, image: image, key: key, hash: sha([]byte(key)), actor: "local", expected: r.Generation})
				if err != nil {
					g.Errorf("refused: %v", err)
					return
				}
				g.mu.Lock()
				g.tell()
				g.mu.Unlock()
			}
		}()
	}
	select {}
}

func idle(s *service) bool {
	r := s.rec.Load()
	return s.usable() == nil && r.active() == nil && r.Held == nil && (r.Current == nil || r.Installed)
}

// tell prints each record that was not printed yet. It is called before every durable step, under mu, so
// that nothing that comes later can have saved what is printed.
func (g *guest) tell() {
	for _, s := range g.services {
		r := s.rec.Load()
		if r == g.told[s.name] || r.Operation == nil {
			continue
		}
		g.told[s.name] = r
		op := r.Operation
		a := answered{Service: s.name, Operation: op.ID, Key: op.Key, Hash: op.RequestHash, Image: op.Candidate.Image, State: op.State, Step: op.Step,
			Candidate: op.Candidate.Generation, Generation: r.Generation, Next: r.NextGeneration, Installed: r.Installed, Updated: r.UpdatedAt, Head: r.EventHead}
		if r.Current != nil {
			a.Current = r.Current.Generation
		}
		if n := len(r.Events); n > 0 {
			a.Head = eventHead{r.Events[n-1].Cursor, r.Events[n-1].Hash}
		}
		b, _ := json.Marshal(a)
		g.say("answered %s", b)
		g.answers++
	}
	if g.freeze > 0 && g.answers >= g.freeze {
		// Nothing durable is begun any more, by anybody: mu is kept.
		g.say("frozen")
		for {
			time.Sleep(time.Hour)
		}
	}
}
