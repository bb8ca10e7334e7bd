package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// deafSocket is a socket that takes connections and never says a word.
func deafSocket(t *testing.T, path string) {
	t.Helper()
	ln, err := net.Listen("unix", path)
	must(t, err)
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
		}
	}()
}

// systemd hears READY=1 and then a sign of life at least each period, also while neither the manager's bus
// nor Podman answers anything: a restart would help neither.
func TestWatchdogWhileTheHostHangs(t *testing.T) {
	dir, err := os.MkdirTemp("", "wd") // the paths of sockets have to be short
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, sub := range []string{"data", "quadlets", "enrollment"} {
		must(t, os.Mkdir(filepath.Join(dir, sub), 0o700))
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	deafSocket(t, at("bus"))
	deafSocket(t, at("podman"))
	said, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: at("notify"), Net: "unixgram"})
	must(t, err)
	defer said.Close()
	t.Setenv("NOTIFY_SOCKET", at("notify"))

	const period = 2 * time.Second
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- serve(ctx, serveConfig{bus: "unix:path=" + at("bus"), podman: "unix://" + at("podman"), quadlets: at("quadlets"),
			data: at("data"), enrollment: at("enrollment"), watchdog: period}, slog.New(slog.NewTextHandler(testWriter{t}, nil)))
	}()
	read := func() string {
		b := make([]byte, 256)
		must(t, said.SetReadDeadline(time.Now().Add(10*period)))
		n, err := said.Read(b)
		must(t, err)
		return string(b[:n])
	}
	if got := read(); got != "READY=1" {
		t.Fatalf("it said %q first, want READY=1", got)
	}
	// The manager is looked at each five seconds: this is longer.
	for begun, last := time.Now(), time.Now(); time.Since(begun) < 6*time.Second; last = time.Now() {
		if got := read(); got != "WATCHDOG=1" || time.Since(last) > period {
			t.Fatalf("it said %q after %s, want WATCHDOG=1 within %s", got, time.Since(last), period)
		}
	}
	cancel()
	for got := read(); got != "STOPPING=1"; got = read() {
		if got != "WATCHDOG=1" {
			t.Fatalf("it said %q before STOPPING=1", got)
		}
	}
	must(t, <-ended)
}

// tofu runs OpenTofu in a directory.
func tofu(t *testing.T, dir string, args ...string) (string, error) {
	t.Helper()
	out, err := exec.Command("testdata/tofu", append([]string{"-chdir=" + dir}, args...)...).CombinedOutput()
	return string(out), err
}

// stack is a root module that uses infra/tofu as the guide says.
type stack struct {
	t         *testing.T
	dir, home string
}

func newStack(t *testing.T) *stack {
	if testing.Short() {
		t.Skip("this test builds OpenTofu the first time: run without -short")
	}
	s := &stack{t: t, dir: t.TempDir(), home: t.TempDir()}
	s.write("")
	s.tofu("init", "-no-color")
	return s
}

const stackImage = "registry.example.org/toad/toad@sha256:" + "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// write writes the root module with these services, and whatever else is given.
func (s *stack) write(services string, more ...string) {
	s.t.Helper()
	repo, err := filepath.Abs(".")
	must(s.t, err)
	text := fmt.Sprintf("module \"toad\" {\n  source = %q\n  home = %q\n  image = %q\n  networks = { apps = {} }\n  services = {\n%s\n  }\n%s\n}\n"+
		"output \"enrollment\" { value = module.toad.enrollment }\n", repo+"//infra/tofu", s.home, stackImage, services, strings.Join(more, "\n"))
	must(s.t, os.WriteFile(filepath.Join(s.dir, "main.tf"), []byte(text), 0o600))
}

func (s *stack) tofu(args ...string) string {
	s.t.Helper()
	out, err := tofu(s.t, s.dir, args...)
	if err != nil {
		s.t.Fatalf("tofu %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func (s *stack) apply() {
	s.t.Helper()
	s.tofu("apply", "-auto-approve", "-no-color", "-input=false")
}

// check is `toad check` over what was rendered.
func (s *stack) check() (string, bool) {
	var out bytes.Buffer
	ok := checkDirectory(&out, s.home+"/.config/toad/enrollment", enrollOptions{quadlets: s.home + "/.config/containers/systemd", reserved: splitNames(reservedNames)})
	return out.String(), ok
}

// files is every file of the home, with its inode, so that one that was written anew is another.
func (s *stack) files() map[string]string {
	files := map[string]string{}
	must(s.t, filepath.WalkDir(s.home, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		must(s.t, err)
		files[strings.TrimPrefix(path, s.home+"/")] = fmt.Sprintf("%d %s\n%s", info.Sys().(*syscall.Stat_t).Ino, info.ModTime(), readFile(s.t, path))
		return nil
	}))
	return files
}

const (
	helloStack = `hello = {
    repository = "registry.example.org/apps/hello"
    readiness  = { port = 8080, path = "/ready", network = "apps" }
  }`
	fullStack = `full = {
    description = "all of it"
    unit        = "full-unit.container"
    repository  = "registry.example.org:5000/apps/full"
    image_limit = "512MiB"
    readiness = { port = 8443, path = "/ready?deep=1", network = "apps", host = "full.example.org", scheme = "https",
      insecure = true, status = 204, interval = "500ms", timeout = "1s" }
    probation      = { rollout_deadline = "5m", stability_window = "1m30s", restart_budget = 0, startup_deadline = "2m" }
    fetch_deadline = "1h"
    stop_seconds   = 20
    barrier        = true
    networks       = ["back"]
    publish        = ["127.0.0.1:8443:8443"]
    volumes        = ["full-data:/data", "/srv/full:/srv:ro"]
    secrets        = ["full-key,type=mount"]
    environment    = { GREETING = "say \"hello\" \\ twice", ODD = "100% of $HOME, $$, %h %% and $${X} 'so'", PLAIN = "1" }
    environment_files = ["/etc/full.env"]
    read_only      = false
    capabilities   = ["NET_BIND_SERVICE"]
    extra = {
      Unit      = ["After=network-online.target"]
      Container = ["HealthCmd=none", "LogDriver=journald"]
      Service   = ["RestartSec=2"]
      Install   = ["WantedBy=multi-user.target"]
    }
  }`
)

// both applies both services.
func (s *stack) both() {
	s.t.Helper()
	s.write(helloStack+"\n"+fullStack, `flags = { "plain-http" = "registry.example.org:5000" }`, `page_host = "toad.example.org"`)
	main := s.dir + "/main.tf"
	must(s.t, os.WriteFile(main, bytes.Replace(readFile(s.t, main), []byte("apps = {} }"), []byte(`apps = {}, back = { options = ["Internal=true"] } }`), 1), 0o600))
	s.tofu("validate", "-no-color")
	s.apply()
}

// What the module renders is a whole and valid enrollment, and it says what was asked for.
func TestModuleRenders(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.both()
	if out, ok := s.check(); !ok {
		t.Errorf("toad check refuses what was rendered:\n%s", out)
	}
	all, err := readEnrollments(s.home+"/.config/toad/enrollment", enrollOptions{})
	must(t, err)
	want := enrollment{Version: 1, Service: "hello", Unit: "hello.container", Repository: "registry.example.org/apps/hello", ImageLimit: 4 << 30,
		Readiness:     readiness{Port: 8080, Path: "/ready", Network: "apps", Interval: duration(time.Second), Timeout: duration(2 * time.Second)},
		Probation:     probation{RolloutDeadline: duration(2 * time.Minute), StabilityWindow: duration(30 * time.Second), RestartBudget: 1},
		FetchDeadline: duration(10 * time.Minute), StopDeadline: duration(30 * time.Second)}
	if diff := cmp.Diff(want, all["hello"].enrollment); diff != "" {
		t.Errorf("hello (-want +got):\n%s", diff)
	}
	want = enrollment{Version: 1, Service: "full", Unit: "full-unit.container", Repository: "registry.example.org:5000/apps/full", ImageLimit: 512 << 20,
		Readiness: readiness{Port: 8443, Path: "/ready?deep=1", Network: "apps", Host: "full.example.org", Scheme: "https", Insecure: true, Status: 204,
			Interval: duration(500 * time.Millisecond), Timeout: duration(time.Second)},
		Probation:     probation{RolloutDeadline: duration(5 * time.Minute), StabilityWindow: duration(90 * time.Second), StartupDeadline: duration(2 * time.Minute)},
		FetchDeadline: duration(time.Hour), StopDeadline: duration(66 * time.Second), Barrier: true}
	if diff := cmp.Diff(want, all["full"].enrollment); diff != "" {
		t.Errorf("full (-want +got):\n%s", diff)
	}
	rendered := func(file string) string {
		return string(readFile(t, s.home+"/"+file))
	}
	golden(t, "testdata/tofu-module/full-unit.container", []byte(rendered(".config/toad/enrollment/full-unit.container")))
	golden(t, "testdata/tofu-module/hello.container", []byte(rendered(".config/toad/enrollment/hello.container")))
	golden(t, "testdata/tofu-module/host.conf", []byte(rendered(".config/containers/systemd/_infra/toad/toad.container.d/host.conf")))
	golden(t, "testdata/tofu-module/back.network", []byte(rendered(".config/containers/systemd/_infra/back/back.network")))
	for _, name := range []string{"toad.container", "toad.network"} {
		if got := rendered(".config/containers/systemd/_infra/toad/" + name); got != string(readFile(t, "infra/"+name)) {
			t.Errorf("%s is not the one in infra:\n%s", name, got)
		}
	}
}

// Podman's generator makes all units of what the module renders, and of what Toad will render from it.
func TestModuleUnitsAreGenerated(t *testing.T) {
	t.Parallel()
	_ = generator(t)
	s := newStack(t)
	s.both()
	all, err := readEnrollments(s.home+"/.config/toad/enrollment", enrollOptions{})
	must(t, err)
	quadlets := s.home + "/.config/containers/systemd/"
	for name, e := range all {
		must(t, os.Mkdir(quadlets+name, 0o700))
		must(t, os.WriteFile(quadlets+name+"/"+e.Unit, renderUnit(e, goldenIdentity(name)), 0o600))
	}
	units, said := generate(t, quadlets)
	for name, want := range map[string][]string{
		"toad.service": {" --network apps ", " --env TOAD_WATCHDOG=2m ", " --env TOAD_PLAIN_HTTP=registry.example.org:5000 ", " --pull missing ", " --read-only ", " --read-only-tmpfs=false ",
			" --cap-drop all ", " --security-opt=no-new-privileges ", "\nWatchdogSec=120\n", "\nRestart=always\n", " --sdnotify=container ", " --log-driver journald ", stackImage},
		"toad-gateway.service": {" --network toad ", " --env TOAD_HOST=toad.example.org ", " --env TOAD_WATCHDOG=30s ", " --pull missing ", " --read-only ", " --read-only-tmpfs=false ",
			" --cap-drop all ", " --security-opt=no-new-privileges ", "\nWatchdogSec=30\n", "\nRestart=always\n", " --sdnotify=container ", " --log-driver journald ", stackImage + " gateway\n"},
		"toad-network.service": {"isolate=strict", " toad\n"},
		"apps-network.service": {" apps\n"},
		"back-network.service": {" --internal ", " back\n"},
		"hello.service":        {" --network apps ", "\n[Install]\n"},
		"full-unit.service":    {" --network apps ", " --network back ", "--secret full-key,type=mount", "GREETING=say", " --env \"ODD=100%% of $$HOME, $$$$, %%h %%%% and $${X} 'so'\" "},
	} {
		for _, w := range want {
			if !strings.Contains(units[name], w) {
				t.Errorf("%s has no %q:\n%s\n%s", name, w, units[name], said)
			}
		}
	}
}

// A plan refuses names, repositories, ports and durations that cannot be, and lines that are two.
func TestModuleRefuses(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	refused := func(name, want string) {
		t.Helper()
		out, err := tofu(t, s.dir, "plan", "-no-color", "-input=false")
		// It draws a frame, and breaks lines where it likes.
		if text := strings.Join(strings.Fields(strings.ReplaceAll(out, "│", "")), " "); err == nil || !strings.Contains(text, want) {
			t.Errorf("%s: want a refusal with %q, got %v\n%s", name, want, err, out)
		}
	}
	for name, tt := range map[string]struct{ from, to, want string }{
		"service":         {"hello = {", `"Hello_1" = {`, "A service's identifier is"},
		"own prefix":      {"hello = {", `"toad-hello" = {`, "does not begin with toad-"},
		"unit":            {"repository", "unit = \"../x.container\"\n repository", "unit must be a plain file name"},
		"tag":             {"apps/hello\"", "apps/hello:latest\"", "repository must be"},
		"digest":          {"apps/hello\"", "apps/hello@sha256:0\"", "repository must be"},
		"no registry":     {"registry.example.org/apps/hello", "apps/hello", "repository must be"},
		"port":            {"8080", "65536", "readiness.port must be"},
		"half a port":     {"8080", "80.5", "readiness.port must be"},
		"network":         {`network = "apps"`, `network = "toad"`, "A network is named"},
		"duration":        {`network = "apps"`, `network = "apps", interval = "1 second"`, "A duration is"},
		"no duration":     {`network = "apps"`, `network = "apps", timeout = "0s"`, "A duration is"},
		"two lines":       {"repository", "volumes = [\"x:/y\\nImage=z\"]\n repository", "one line"},
		"a continued one": {"repository", "environment = { A = \"x\\\\\" }\n repository", "one line"},
		"variable":        {"repository", "environment = { \"A B\" = \"x\" }\n repository", "environment variable"},
		"section":         {"repository", "extra = { Kube = [\"Yaml=x\"] }\n repository", "extra knows"},
		"unknown type":    {"8080", `"many"`, "a number is required"},
	} {
		s.write(strings.Replace(helloStack, tt.from, tt.to, 1))
		refused(name, tt.want)
	}
	for name, tt := range map[string]struct{ more, want string }{
		"network":    {"networks = { toad = {} }", "A network's name"},
		"page":       {`page_host = "https://toad.example.org"`, "page_host must be"},
		"flag":       {`flags = { "--listen" = "x" }`, "flags knows"},
		"own flag":   {`flags = { data = "/elsewhere" }`, "flags knows"},
		"flag value": {`flags = { listen = "a\nPull=always" }`, "A flag's value"},
	} {
		s.write(helloStack, tt.more)
		text := readFile(t, s.dir+"/main.tf")
		if strings.HasPrefix(tt.more, "networks") {
			text = bytes.Replace(text, []byte("networks = { apps = {} }"), nil, 1)
		}
		must(t, os.WriteFile(s.dir+"/main.tf", text, 0o600))
		refused(name, tt.want)
	}
	// What a plan lets through `toad check` refuses: it judges the same files as the server.
	s.write(strings.Replace(helloStack, "repository", "extra = { Container = [\"AutoUpdate=registry\"] }\n repository", 1))
	s.apply()
	if out, ok := s.check(); ok || !strings.Contains(out, "AutoUpdate= is not allowed") {
		t.Errorf("toad check said:\n%s", out)
	}
}

// The module takes the flags of `toad serve` but those that the unit and its mounts decide.
func TestModuleKnowsTheFlags(t *testing.T) {
	m := regexp.MustCompile(`contains\(\[(.*)\], name\)\]\)\n +error_message = "flags knows (.*)\."`).FindStringSubmatch(string(readFile(t, "infra/tofu/variables.tf")))
	if m == nil {
		t.Fatal("no list of flags in variables.tf")
	}
	var want []string
	serveCmd(io.Discard, io.Discard).FlagSet.VisitAll(func(f *flag.Flag) {
		if !slices.Contains([]string{"bus", "podman", "data", "quadlets", "enrollment", "watchdog"}, f.Name) {
			want = append(want, f.Name)
		}
	})
	if got := strings.Split(strings.ReplaceAll(m[1], `"`, ""), ", "); !slices.Equal(got, want) {
		t.Errorf("the module takes %q, want %q", got, want)
	}
	if got := strings.Split(strings.Replace(m[2], " and ", ", ", 1), ", "); !slices.Equal(got, want) {
		t.Errorf("the refusal names %q, want %q", got, want)
	}
}

// Applying, changing and applying again, taking one enrollment away, and destroying all of it touch no unit that
// Toad activated.
func TestModuleLeavesActivatedUnitsAlone(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	quadlets := s.home + "/.config/containers/systemd/"
	s.write(helloStack + "\n" + strings.ReplaceAll(helloStack, "hello", "other"))
	s.apply()
	activated := map[string]string{}
	for _, service := range []string{"hello", "other"} {
		must(t, os.Mkdir(quadlets+service, 0o700))
		must(t, os.WriteFile(quadlets+service+"/"+service+".container", []byte("# toad data=…\n"), 0o644))
		must(t, os.Link(quadlets+service+"/"+service+".container", quadlets+service+"/"+service+".container.prev"))
	}
	for path, file := range s.files() {
		if rel, ok := strings.CutPrefix(path, ".config/containers/systemd/"); ok && !strings.HasPrefix(rel, "_infra/") {
			activated[path] = file
		}
	}
	if len(activated) != 4 {
		t.Fatalf("%d files are not the module's", len(activated))
	}
	untouched := func(what string) {
		t.Helper()
		now := s.files()
		for path, file := range activated {
			if now[path] != file {
				t.Errorf("%s: %s was touched:\n%s\n%s", what, path, file, now[path])
			}
		}
	}

	if out := s.tofu("plan", "-no-color", "-input=false", "-detailed-exitcode"); !strings.Contains(out, "No changes") {
		t.Errorf("what was applied is planned again:\n%s", out)
	}
	before := s.files()
	for path := range before {
		if strings.Contains(path, "gateway") {
			t.Errorf("there is a gateway without a page_host: %s", path)
		}
	}
	s.write(strings.Replace(helloStack, "8080", "8081", 1) + "\n" + strings.ReplaceAll(helloStack, "hello", "other"))
	s.apply()
	untouched("changing one")
	if !strings.Contains(string(readFile(t, s.home+"/.config/toad/enrollment/hello.json")), "8081") {
		t.Error("the change was not applied")
	}
	for path, file := range s.files() {
		if path != ".config/toad/enrollment/hello.json" && before[path] != file {
			t.Errorf("changing one: %s changed too", path)
		}
	}
	s.write(strings.ReplaceAll(helloStack, "hello", "other"))
	s.apply()
	untouched("taking one away")
	left, err := filepath.Glob(s.home + "/.config/toad/enrollment/*")
	must(t, err)
	if len(left) != 2 {
		t.Errorf("left are %q, want other's two files", left)
	}
	s.tofu("destroy", "-auto-approve", "-no-color", "-input=false")
	untouched("destroying")
	if now := s.files(); len(now) != len(activated) {
		t.Errorf("destroying left %d files, want %d", len(now), len(activated))
	}
}

// Every line of the acceptance list names tests, and they exist.
func TestAcceptanceNamesTests(t *testing.T) {
	var all []byte
	files, err := filepath.Glob("*_test.go")
	must(t, err)
	for _, f := range files {
		all = append(all, readFile(t, f)...)
	}
	rows := 0
	for line := range strings.Lines(string(readFile(t, "ACCEPTANCE.md"))) {
		cells := strings.Split(line, "|")
		if len(cells) != 4 || strings.HasPrefix(cells[1], " ---") || strings.HasPrefix(cells[1], " the specification") {
			continue
		}
		rows++
		names := regexp.MustCompile("`(Test[A-Za-z]+)`").FindAllStringSubmatch(cells[2], -1)
		if len(names) == 0 {
			t.Errorf("no test proves: %s", cells[1])
		}
		for _, n := range names {
			if !bytes.Contains(all, []byte("func "+n[1]+"(")) {
				t.Errorf("there is no %s, which is to prove: %s", n[1], cells[1])
			}
		}
	}
	if rows != 15 {
		t.Errorf("%d lines, the specification has 15", rows)
	}
}
