package main

import (
	"debug/elf"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// What a host lacks is said before a deployment finds out: the user does not linger (CASES E7), the network never
// gets online (LAB section 10), Toad does not run.
func TestLabDoctor(t *testing.T) {
	l := theLab(t)
	l.enroll(t, "doctored")
	finds := func(problem string, who ...string) {
		t.Helper()
		out, status := l.try(append(who, "toad", "doctor")...)
		var problems []string
		for line := range strings.Lines(out) {
			if rest, is := strings.CutPrefix(line, "problem: "); is {
				name, _, _ := strings.Cut(rest, ": ")
				problems = append(problems, name)
			}
		}
		if got := strings.Join(problems, " "); got != problem || (status == 0) != (problem == "") {
			t.Errorf("exit %d, problems %q, want %q\n%s", status, got, problem, out)
		}
	}
	finds("")
	finds("", "--root")

	linger := func() { l.root(t, "touch /var/lib/systemd/linger/toad") }
	t.Cleanup(linger)
	l.root(t, "rm /var/lib/systemd/linger/toad")
	finds("linger")
	linger()

	wait := ".config/systemd/user/" + waitOnline + ".d"
	mended := func() {
		l.exec(t, "rm -rf "+wait+" && systemctl --user daemon-reload && systemctl --user restart "+waitOnline)
	}
	t.Cleanup(mended)
	l.write(t, wait+"/never.conf", "[Service]\nExecStart=\nExecStart=/bin/false\n")
	l.exec(t, "systemctl --user daemon-reload; ! systemctl --user restart "+waitOnline)
	finds(waitOnline)
	mended()

	release := l.holdToad(t)
	finds("toad.service")
	release()
	finds("")
}

// rebuild makes Toad's image from a fresh context with that binary, as the Containerfile says, and returns what
// Podman knows of it.
func (l *lab) rebuild(t testing.TB, binary, tag string, mode os.FileMode) (image struct {
	ID, Digest string
	Size       int64
	Labels     map[string]string
	Config     struct{ Entrypoint, Cmd []string }
}) {
	t.Helper()
	context := "/home/toad/.cache/lab/" + tag
	l.root(t, "rm -rf "+context+" && mkdir -p "+context)
	for from, to := range map[string]string{binary: "toad", "Containerfile": "Containerfile"} {
		must(t, os.WriteFile(l.path(context+"/"+to), readFile(t, from), 0o644))
	}
	must(t, os.Chmod(l.path(context+"/toad"), mode))
	l.exec(t, "podman build --quiet --timestamp 0 --layers=false --identity-label=false --build-arg BUILD=prebuilt"+
		" --build-arg VERSION=v1.2.3 --build-arg REVISION=0123abc --tag localhost/"+tag+" "+context)
	t.Cleanup(func() {
		l.try("podman", "rmi", "localhost/"+tag)
		l.try("--root", "rm", "-rf", context)
	})
	must(t, json.Unmarshal([]byte(l.exec(t, "podman image inspect --format '{{json .}}' localhost/"+tag)), &image))
	return image
}

// The image is one static binary, small, labelled, and the same whenever it is built.
func TestLabImage(t *testing.T) {
	l := theLab(t)
	binary := l.path("/home/toad/.cache/lab/toad/toad") // what `lab install` built
	f, err := elf.Open(binary)
	must(t, err)
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("the binary is not static: it has %v", p.Type)
		}
	}

	first := l.rebuild(t, binary, "first", 0o755)
	second := l.rebuild(t, binary, "second", 0o744)
	if first.Digest != second.Digest || first.ID != second.ID || first.Digest == "" {
		t.Errorf("two builds made %s and %s", first.Digest, second.Digest)
	}
	if first.Size >= 30<<20 {
		t.Errorf("the image has %d bytes, want less than 30 MiB", first.Size)
	}
	want := map[string]string{
		"org.opencontainers.image.title": "Toad", "org.opencontainers.image.licenses": "Apache-2.0",
		"org.opencontainers.image.description": "Deploys singleton containers with Podman Quadlet and systemd",
		"org.opencontainers.image.version":     "v1.2.3", "org.opencontainers.image.revision": "0123abc",
	}
	if diff := cmp.Diff(want, first.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if !slices.Equal(first.Config.Entrypoint, []string{"/toad"}) || !slices.Equal(first.Config.Cmd, []string{"serve"}) {
		t.Errorf("it runs %q %q", first.Config.Entrypoint, first.Config.Cmd)
	}
	if got := l.exec(t, `podman unshare sh -c 'cd "$(podman image mount localhost/first)" && find . -mindepth 1; podman image unmount localhost/first >/dev/null'`); got != "./toad" {
		t.Errorf("beside the binary there is something in it:\n%s", got)
	}
}

// Toad and its gateway run as their units say: nothing writable but their mounts, no capability and no way to
// one, and a watchdog that hears of them.
func TestLabConfinement(t *testing.T) {
	l := theLab(t)
	l.mustCall(t, "GET", "/v1/services", nil, &wireServices{}) // it is up
	periods := map[string]string{"toad": "2min", "toad-gateway": "30s"}
	for name, want := range map[string][]string{"toad": {"/data", "/quadlet", "/run/toad/bus", "/run/toad/podman"}, "toad-gateway": {"/run/toad-web"}} {
		proc := func(file string) string {
			return l.exec(t, "cat /proc/$(podman container inspect --format '{{.State.Pid}}' "+name+")/"+file)
		}
		status := proc("status")
		for _, line := range []string{"CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} {
			if !strings.Contains(status, line+"\n") {
				t.Errorf("%q is not in the status of %s:\n%s", line, name, status)
			}
		}
		var writable []string
		for line := range strings.SplitSeq(proc("mountinfo"), "\n") {
			f := strings.Fields(line)
			if path := f[4]; !strings.HasPrefix(f[5], "ro") && !strings.HasPrefix(path, "/proc") && !strings.HasPrefix(path, "/sys") && !strings.HasPrefix(path, "/dev") {
				writable = append(writable, path)
			}
		}
		slices.Sort(writable)
		if !slices.Equal(writable, want) {
			t.Errorf("%s can write %q, want %q", name, writable, want)
		}
		if got := l.exec(t, "systemctl --user show -P WatchdogUSec "+name+".service"); got != periods[name] {
			t.Errorf("the period of the watchdog of %s is %s", name, got)
		}
		var told time.Time
		l.eventuallyFor(t, 90*time.Second, "a second sign of life of "+name, func() bool {
			at, err := time.Parse("Mon 2006-01-02 15:04:05 MST", l.exec(t, "systemctl --user show -P WatchdogTimestamp "+name+".service"))
			if told.IsZero() {
				told = at
			}
			return err == nil && at.After(told)
		})
	}
}

// What hangs in Toad itself, or in its gateway, is ended by the watchdog, and nothing of the services is touched.
func TestLabWatchdog(t *testing.T) {
	l := theLab(t)
	s := l.enroll(t, "watched", brisk)
	s.promote(s.image("VERSION=1"))
	const shorter = ".config/containers/systemd/_infra/toad/toad.container.d/watchdog.conf"
	t.Cleanup(func() {
		l.try("sh", "-c", "rm -f "+shorter+"; systemctl --user daemon-reload; systemctl --user restart toad.service")
	})
	l.write(t, shorter, "[Container]\nEnvironment=TOAD_WATCHDOG=15s\n\n[Service]\nWatchdogSec=15\n")
	l.exec(t, "systemctl --user daemon-reload && systemctl --user restart toad.service")
	before := map[string]string{}
	for _, unit := range []string{"toad.service", "toad-gateway.service"} {
		before[unit] = l.exec(t, "systemctl --user show -P InvocationID "+unit)
	}
	_, cursor, found := strings.Cut(l.exec(t, "journalctl --user -n 0 --show-cursor"), "-- cursor: ")
	if !found {
		t.Fatal("the journal has no cursor")
	}
	s.untouched(func() {
		l.exec(t, "podman kill --signal STOP toad toad-gateway")
		for unit, invocation := range before {
			l.eventuallyFor(t, 90*time.Second, unit+" is started again", func() bool {
				now, _ := l.try("systemctl", "--user", "show", "-P", "InvocationID", unit)
				state, _ := l.try("systemctl", "--user", "is-active", unit)
				return now != "" && now != invocation && state == "active"
			})
		}
	})
	for unit, invocation := range before { // the unit itself has forgotten by now how its run before ended
		got := l.exec(t, "journalctl --user --no-pager --output=cat --after-cursor='"+cursor+"' UNIT_RESULT=watchdog USER_UNIT="+unit+" USER_INVOCATION_ID="+invocation)
		if got == "" || strings.Contains(got, "No entries") {
			t.Errorf("%s was ended by another: %s", unit, l.exec(t, "journalctl --user --no-pager --after-cursor='"+cursor+"' -u "+unit))
		}
	}
	s.promote(s.image("VERSION=2"))
	if out := l.root(t, "curl -s -o /dev/null -w '%{http_code}' --retry 20 --retry-delay 1 --unix-socket /run/toad-web/gateway.sock http://toad.lab/"); out != "200" {
		t.Errorf("the page is answered with %s", out)
	}
}

// What else works on a host, in the middle of a probation and over and over: scheduled updates and garbage
// collection, reloads by others, an apply that changes an enrollment and one that takes it away. No unit of a
// service is touched, the outcome is what it would have been, and what a rollback needs is there.
func TestLabCoexistence(t *testing.T) {
	inTurn(t, 1)
	l := theLab(t)
	slow := func(s *labService) {
		brisk(s)
		s.en.Probation.StabilityWindow, s.en.Probation.StartupDeadline = duration(45*time.Second), duration(55*time.Second)
		s.en.Probation.RolloutDeadline = duration(150 * time.Second)
	}
	good, bad, gone := l.enroll(t, "coex-good", slow), l.enroll(t, "coex-bad", slow), l.enroll(t, "coex-gone", slow)
	first, second := good.image("VERSION=1"), good.image("VERSION=2")
	good.promote(first)
	bad.promote(bad.image("VERSION=1"))
	gone.promote(gone.image("VERSION=1"))

	up := good.submit(second)
	never := bad.submit(bad.image("VERSION=2", "READY_AFTER=1h"))
	good.awaitState(up.ID, "probation")
	bad.awaitState(never.ID, "probation")
	units := func() string {
		return l.exec(t, `cd .config/containers/systemd; for s in coex-good coex-bad coex-gone; do stat -c '%n %i %Y' $s/$s.container; systemctl --user show -P InvocationID $s.service; done`)
	}
	before := units()
	infra := l.exec(t, "cd .config/containers/systemd/_infra && find . -type f -exec sha256sum {} + | sort")
	for range 2 {
		l.exec(t, "systemctl --user start podman-auto-update.service")
		l.exec(t, "systemd-run --user --wait --quiet podman system prune --all --force")
		l.exec(t, "systemctl --user daemon-reload")
		// As an apply does: a changed file is deleted, and then created.
		l.exec(t, "rm -f .config/toad/enrollment/coex-good.* .config/toad/enrollment/coex-gone.*")
		good.tmpl = strings.Replace(good.tmpl, "[Container]\n", "[Container]\nEnvironment=APPLIED=1\n", 1)
		good.apply()
		bad.apply()
	}
	if op := good.await(up.ID, func(op wireOperation) bool { return true }); op.State != "probation" || op.Restarts != 0 {
		t.Fatalf("it is %s with %d restarts: this was no probation", op.State, op.Restarts)
	}
	if diff := cmp.Diff(before, units()); diff != "" {
		t.Errorf("units were touched (-before +after):\n%s", diff)
	}
	op := good.await(up.ID, nil)
	good.expect(op, "promoted", "")
	if op.Restarts != 0 {
		t.Errorf("%d restarts", op.Restarts)
	}
	bad.expect(bad.await(never.ID, nil), "rolled_back", "startup_deadline")
	good.expectRuns(second)
	gone.expectRuns(gone.view().Current.Image)
	if after := l.exec(t, "cd .config/containers/systemd/_infra && find . -type f -exec sha256sum {} + | sort"); after != infra {
		t.Errorf("Toad wrote to infrastructure's units:\n%s\n%s", infra, after)
	}

	// The changed template waits for the next deployment; the one that is gone goes on running.
	good.eventually("the unit is installed", func() bool { return good.view().Installed })
	if !good.view().Enrollment.DiffersFromCurrent || strings.Contains(good.unitFile(), "APPLIED") {
		t.Errorf("differs_from_current is %v, the unit\n%s", good.view().Enrollment.DiffersFromCurrent, good.unitFile())
	}
	l.exec(t, "systemd-run --user --wait --quiet podman system prune --all --force")
	good.eventually("the retained revision is there again", func() bool { v := good.view().Rollback; return v != nil && v.Ready })
	l.root(t, "systemctl stop docker-registry")
	defer l.root(t, "systemctl start docker-registry")
	good.expect(good.rollback(), "promoted", "")
	good.expectRuns(first)
	if !strings.Contains(good.unitFile(), "APPLIED") || good.view().Enrollment.DiffersFromCurrent {
		t.Errorf("the deployment did not take the template up:\n%s", good.unitFile())
	}
	var refused *problem
	gone.eventually("it takes no deployment without an enrollment", func() bool {
		refused = l.mustCall(t, "POST", "/v1/deployments", gone.request(gone.view().Current.Image), &wireOperation{})
		return refused != nil && refused.Code == "enrollment_invalid"
	})
	gone.expectRuns(gone.view().Current.Image)
}

// guideStep is one command block of infra/README.md.
type guideStep struct{ number, user, commands string }

// guide reads the numbered steps that have commands.
func guide(t *testing.T) []guideStep {
	t.Helper()
	var steps []guideStep
	numbered := regexp.MustCompile(`^([0-9]+)\. As (root|toad): `)
	var at guideStep
	fence := ""
	for line := range strings.SplitSeq(string(readFile(t, "infra/README.md")), "\n") {
		bare := strings.TrimLeft(line, " ")
		switch m := numbered.FindStringSubmatch(line); {
		case m != nil:
			at = guideStep{number: m[1], user: m[2]}
		case fence == "" && strings.HasPrefix(bare, "```sh"):
			fence = line[:len(line)-len(bare)] + "```"
			at.commands = ""
		case line == fence && fence != "":
			fence = ""
			steps = append(steps, at)
		case fence != "":
			at.commands += strings.TrimPrefix(line, strings.TrimSuffix(fence, "```")) + "\n"
		}
	}
	return steps
}

func TestGuideHasStepsOfBoth(t *testing.T) {
	users := map[string]int{}
	for _, s := range guide(t) {
		users[s.user]++
		if s.number == "" || s.commands == "" {
			t.Errorf("a block belongs to no numbered step: %+v", s)
		}
	}
	if users["root"] < 3 || users["toad"] < 6 || users[""] > 0 {
		t.Errorf("steps by user: %v", users)
	}
}

// The guide leads from a host that knows nothing of Toad to a deployed service and over an upgrade, as it is
// written. What the lab cannot have is put in its place: packages come from its disk, the image's compiling
// stage is the prebuilt one, the registry has no TLS, and Caddy makes its own certificate. Afterwards the module is applied in the middle of a
// probation, and takes one enrollment away.
func TestLabGuide(t *testing.T) {
	inTurn(t, 2)
	shared := theLab(t)
	l := &lab{name: shared.name + "-guide"}
	lab := func(args ...string) {
		t.Helper()
		if out, err := l.lab(args...).CombinedOutput(); err != nil {
			t.Fatalf("lab %s: %v\n%s", args[0], err, out)
		}
	}
	lab("up")
	t.Cleanup(func() { lab("destroy") })

	// Its workloads and the program, made as the user that is about to go.
	images := map[string]string{
		"sha256:FIRST": l.image(t, "hello", "VERSION=1"), "sha256:SECOND": l.image(t, "hello", "VERSION=2"), "sha256:THIRD": l.image(t, "hello", "VERSION=3"),
	}
	l.root(t, `loginctl disable-linger toad; systemctl stop user@1001.service; pkill -KILL -u toad; userdel --force --remove toad 2>/dev/null; ! id toad 2>/dev/null`)
	source := "/usr/local/src/toad"
	l.root(t, "mkdir -p "+source+" && chmod 755 "+source)
	for _, file := range []string{"Containerfile", "infra"} {
		must(t, exec.Command("cp", "-r", file, l.path(source)).Run())
	}
	must(t, exec.Command("cp", shared.path("/home/toad/.cache/lab/toad/toad"), l.path(source+"/toad")).Run())
	if out, err := exec.Command("testdata/tofu", "version").CombinedOutput(); err != nil {
		t.Fatalf("OpenTofu: %v\n%s", err, out)
	}
	built, err := filepath.Glob(labDir() + "/tofu-*")
	must(t, err)
	must(t, exec.Command("cp", built[0]+"/tofu", l.path("/usr/local/bin/tofu")).Run())
	must(t, exec.Command("cp", "-r", built[0]+"/mirror", l.path("/usr/local/share/tofu")).Run())
	must(t, os.WriteFile(l.path("/etc/skel/.tofurc"), []byte("provider_installation {\n  filesystem_mirror { path = \"/usr/local/share/tofu\" }\n}\n"), 0o644))

	m := regexp.MustCompile(`(?m)^ +(runuser -u toad .*) bash$`).FindStringSubmatch(string(readFile(t, "infra/README.md")))
	if m == nil {
		t.Fatal("the guide opens no shell as toad")
	}
	shell := m[1]
	as := func(user, commands string) string {
		t.Helper()
		for digest, image := range images {
			_, of, _ := strings.Cut(image, "@")
			commands = strings.ReplaceAll(commands, digest, of)
		}
		commands = strings.NewReplacer("registry.example.org", "registry.lab:5000", "toad.example.org", "toad.lab", "https:", "--insecure https:",
			"podman build ", "podman build --build-arg BUILD=prebuilt ", "flags     = {}", `flags = { "plain-http" = "registry.lab:5000" }`).Replace(commands)
		cmd := l.lab("exec", "--root", "sh", "-euc", commands)
		if user == "toad" {
			cmd = l.lab("exec", "--root", "sh", "-euc", "exec "+shell+` sh -euc "$1"`, "sh", commands)
		}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("as %s: %v\n%s\n%s", user, err, commands, out)
		}
		return string(out)
	}
	for _, step := range guide(t) {
		commands := step.commands
		if packages, ok := strings.CutPrefix(commands, "apt-get install --yes "); ok {
			commands = "dpkg-query --show --showformat='${db:Status-Status}\\n' " + packages // they are there already
		}
		out := as(step.user, commands)
		t.Logf("step %s:\n%s", step.number, out)
		switch step.number {
		case "2":
			as("root", "printf '{\n\tlocal_certs\n\tskip_install_trust\n}\n' >/etc/caddy/Caddyfile; echo pond >~/page-password")
			as("root", "install -o toad -m 0600 /dev/stdin /home/toad/password <<'END'\nsecret\nEND\n")
		case "15":
			if !strings.Contains(out, "hello") {
				t.Errorf("the page does not show the service:\n%s", out)
			}
		case "11", "16":
			if !strings.Contains(out, "promoted") {
				t.Errorf("step %s ended otherwise:\n%s", step.number, out)
			}
		case "17":
			if !strings.Contains(out, "apps back toad") {
				t.Errorf("Toad is not on the new network:\n%s", out)
			}
		}
	}
	if got := as("toad", "toad version"); !strings.HasPrefix(got, "toad ") {
		t.Errorf("toad version: %s", got)
	}
	if got := as("toad", "podman container inspect --format '{{.Config.Labels}}' toad"); !strings.Contains(got, "org.opencontainers.image.version:v2") {
		t.Errorf("it is not the upgraded Toad: %s", got)
	}

	// An apply in the middle of a probation: of a changed template, and of a second service that comes and goes.
	unit := func() string {
		return as("toad", `cd ~/.config/containers/systemd/hello; stat -c '%n %i %Y' hello.container; sha256sum hello.container; systemctl --user show -P InvocationID hello.service; systemctl --user show -P NRestarts hello.service`)
	}
	operation := strings.TrimSpace(as("toad", "toad deploy hello registry.example.org/apps/hello@sha256:THIRD --no-wait 2>/dev/null"))
	for end := time.Now().Add(time.Minute); !strings.Contains(as("toad", "toad status hello"), "probation"); time.Sleep(time.Second) {
		if time.Now().After(end) {
			t.Fatal("there is no probation")
		}
	}
	before := unit()
	as("toad", `cd ~/infra && cp main.tf first.txt
sed -i 's|publish  .*|&\n         environment = { APPLIED = "1" }|; s|^  *hello = {|other = {\n repository = "registry.example.org/apps/other"\n readiness = { port = 8080, network = "apps" }\n}\n&|' main.tf
tofu apply -auto-approve && systemctl --user daemon-reload && toad check ~/.config/toad/enrollment && toad status other`)
	if after := unit(); after != before {
		t.Errorf("an apply touched the candidate:\n%s\n%s", before, after)
	}
	if out := as("toad", "toad watch "+operation); !strings.Contains(out, "promoted") {
		t.Errorf("the rollout ended otherwise:\n%s", out)
	}
	if out := as("toad", "toad status hello"); !strings.Contains(out, "the next deployment takes it up") {
		t.Errorf("it does not say that the enrollment changed:\n%s", out)
	}
	before = unit()
	as("toad", `cd ~/infra && cp first.txt main.tf && sed -i '/hello = {/,/^  *}$/d' main.tf && tofu apply -auto-approve && systemctl --user daemon-reload && ! ls ~/.config/toad/enrollment/hello.json 2>/dev/null`)
	if after := unit(); after != before {
		t.Errorf("destroying the enrollment touched the unit:\n%s\n%s", before, after)
	}
	as("toad", "cd ~/infra && tofu destroy -auto-approve && systemctl --user daemon-reload && curl --silent --fail http://127.0.0.1:8080/")
	if after := unit(); after != before {
		t.Errorf("destroying everything touched the unit:\n%s\n%s", before, after)
	}
}

// The container sees the values of the module's environment as they were given to it, on the whole way through
// Toad, Quadlet and systemd.
func TestLabModuleEnvironment(t *testing.T) {
	t.Parallel()
	l := theLab(t)
	values := map[string]string{
		"PERCENT": "100% of %h, %% and %", "DOLLAR": "$HOME, $$, $ and ${HOME}", "ALONE": "$HOME", "QUOTES": `'one' "two" \three \x41 \\` + "`", "SIGNS": "a=b #c ;d — é", "EMPTY": "", "BLANKS": " x ",
	}
	stack := newStack(t)
	var hcl strings.Builder
	for k, v := range values {
		fmt.Fprintf(&hcl, "%s = \"%s\"\n", k, strings.NewReplacer(`\`, `\\`, `"`, `\"`, "${", "$${", "%{", "%%{").Replace(v))
	}
	stack.write(strings.Replace(helloStack, "repository", "environment = {\n"+hcl.String()+"}\n repository", 1))
	stack.apply()
	s := l.enroll(t, "environed", func(s *labService) {
		for line := range strings.Lines(string(readFile(t, stack.home+"/.config/toad/enrollment/hello.container"))) {
			if strings.HasPrefix(line, "Environment=") {
				s.tmpl = strings.Replace(s.tmpl, "[Service]", line+"[Service]", 1)
			}
		}
	})
	s.promote(s.image("VERSION=1"))
	var seen []string
	must(t, json.Unmarshal([]byte(l.exec(t, "podman inspect --format '{{json .Config.Env}}' environed")), &seen))
	for k, v := range values {
		if !slices.Contains(seen, k+"="+v) {
			t.Errorf("%s was given as %q; the container has %q", k, v, seen)
		}
	}
}

// A digest that was promoted before is a new generation, and whoever still has an old one in mind is refused.
func TestLabRedeployedDigest(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "redeployed", brisk)
	first := s.image("VERSION=1")
	s.promote(first)
	stale := s.request(first) // of generation 1
	s.promote(s.image("VERSION=2"))
	if op := s.promote(first); op.Generation != 3 {
		t.Errorf("it is generation %d, want 3", op.Generation)
	}
	p := s.mustCall(t, "POST", "/v1/deployments", stale, &wireOperation{})
	if p == nil || p.Code != "stale_generation" || p.CurrentGeneration == nil || *p.CurrentGeneration != 3 {
		t.Errorf("a request of generation 1 with the same digest: %+v", p)
	}
	s.expectRuns(first)
}

// The compiling stage makes, of a builder image that it is given, the same image to the digest as the prebuilt
// stage does of a binary that was compiled elsewhere. It takes some minutes, so that it has a command of its
// own: go test -run TestLabImageIsCompiled -every-boundary
func TestLabImageIsCompiled(t *testing.T) {
	inTurn(t, never)
	l := theLab(t)
	binary := filepath.Join(t.TempDir(), "toad")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -X main.version=v1.2.3", "-o", binary, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOTOOLCHAIN=local")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := l.rebuild(t, binary, "prebuilt", 0o755)

	// The lab reaches no registry with Go in it: the builder is this machine's Go, with the modules and a shell.
	dir := "/home/toad/.cache/lab/builder"
	t.Cleanup(func() {
		l.try("podman", "rmi", "--ignore", "localhost/compiled", "localhost/builder")
		l.try("--root", "rm", "-rf", dir) // it was copied in as root
	})
	script := exec.Command("sh", "-euc", `
dir=$1 root=$2
rm -rf "$dir"
mkdir -p "$dir/src" "$dir/root/bin" "$dir/root/lib64" "$dir/root/tmp" "$dir/root/usr/local/go"
cd "$(go env GOROOT)"
cp -r bin pkg src lib go.env VERSION "$dir/root/usr/local/go"
cp "$root/bin/dash" "$dir/root/bin/sh"
cp "$root"/lib64/ld-linux* "$root"/lib/*-linux-gnu/libc.so.6 "$dir/root/lib64"
cd "$OLDPWD"
tar -c --exclude ./.git . | tar -x -C "$dir/src"
modules=$(mktemp -d)
GOMODCACHE=$modules GOFLAGS=-modcacherw GOPROXY="file://$(go env GOMODCACHE)/cache/download,$(go env GOPROXY)" go mod download
mv "$modules/cache/download" "$dir/root/modules"
rm -rf "$modules"
cat >"$dir/Containerfile" <<'END'
FROM scratch
COPY root /
ENV PATH=/usr/local/go/bin:/bin HOME=/tmp LD_LIBRARY_PATH=/lib64 GOPROXY=file:///modules GOSUMDB=off
END
`, "sh", l.path(dir), l.path(""))
	if out, err := script.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	l.exec(t, "podman build --quiet --layers=false --tag localhost/builder "+dir)
	l.exec(t, "podman build --quiet --network none --timestamp 0 --layers=false --identity-label=false --build-arg GOLANG=localhost/builder"+
		" --build-arg VERSION=v1.2.3 --build-arg REVISION=0123abc --tag localhost/compiled "+dir+"/src")
	if got := l.exec(t, "podman image inspect --format '{{.Digest}}' localhost/compiled"); got != want.Digest {
		t.Errorf("compiled %s, prebuilt %s", got, want.Digest)
	}
	if got := l.exec(t, "podman run --rm --read-only --cap-drop all --security-opt no-new-privileges --network none localhost/compiled version"); !strings.HasPrefix(got, "toad v1.2.3 ") {
		t.Errorf("it says it is %s", got)
	}
}
