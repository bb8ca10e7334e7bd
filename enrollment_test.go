package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containers/podman/v5/pkg/systemd/parser"
)

var update = flag.Bool("update", false, "write the golden files anew")

const (
	okDir    = "testdata/enrollment/ok"
	quadlets = "testdata/enrollment/quadlets"
)

// enrollmentCase is one case of testdata/enrollment/*.txt: what it changes of the sample, and the
// whole error that is expected.
type enrollmentCase struct {
	name  string
	files map[string]string
	want  string
}

func readEnrollmentCases(t testing.TB, file string) (head string, cases []enrollmentCase) {
	text := string(readFile(t, file))
	head, rest, _ := strings.Cut(text, "=== ")
	for c := range strings.SplitSeq(rest, "\n=== ") {
		body, want, ok := strings.Cut(c+"\n", "\n--- want\n")
		if !ok {
			t.Fatalf("%s: case without want: %s", file, c)
		}
		parts := strings.Split(body, "\n--- file ")
		name, edits, _ := strings.Cut(parts[0], "\n")
		tt := enrollmentCase{name: name, want: strings.TrimSpace(want), files: map[string]string{
			"hello.json":      string(readFile(t, okDir+"/hello.json")),
			"hello.container": string(readFile(t, okDir+"/hello.container")),
		}}
		edit(t, tt.files, edits)
		for _, part := range parts[1:] {
			name, content, _ := strings.Cut(part+"\n", "\n")
			tt.files[name] = content
		}
		cases = append(cases, tt)
	}
	return head, cases
}

// edit changes the sample: "field: value", "-field", or lines at the end of a "[Section]".
func edit(t testing.TB, files map[string]string, edits string) {
	for line := range strings.Lines(edits) {
		line = strings.TrimSuffix(line, "\n")
		field, value, isField := strings.Cut(line, ": ")
		j := files["hello.json"]
		switch {
		case line == "":
		case strings.HasPrefix(line, "-"):
			j = regexp.MustCompile(`(?m)^ *"`+line[1:]+`":.*\n`).ReplaceAllString(j, "")
			files["hello.json"] = regexp.MustCompile(`,(\s*})`).ReplaceAllString(j, "$1")
		case isField && regexp.MustCompile(`^[a-z_]+$`).MatchString(field):
			re := regexp.MustCompile(`("` + field + `": ).*?(,?)\n`)
			if re.MatchString(j) {
				j = re.ReplaceAllString(j, "${1}"+strings.ReplaceAll(value, "$", "$$")+"${2}\n")
			} else {
				j = strings.Replace(j, `"port"`, fmt.Sprintf(`"%s": %s, "port"`, field, value), 1)
			}
			files["hello.json"] = j
		}
	}
	section := ""
	added := map[string]string{}
	for line := range strings.Lines(edits) {
		switch name := strings.TrimSpace(line); {
		case slices.Contains([]string{"[Unit]", "[Container]", "[Service]", "[Install]"}, name):
			section = name
		case section != "":
			added[section] += line
		}
	}
	for section, lines := range added {
		if !strings.HasSuffix(lines, "\n") {
			lines += "\n"
		}
		before, after, _ := strings.Cut(files["hello.container"], section+"\n")
		inside, after, more := strings.Cut(after, "\n\n")
		if more { // not the last section
			after = "\n" + after
		}
		files["hello.container"] = before + section + "\n" + strings.TrimSuffix(inside, "\n") + "\n" + lines + after
	}
}

// writeCase lays out a case and returns its enrollment and Quadlet directories.
func writeCase(t testing.TB, files map[string]string) (dir, quadletDir string) {
	root := t.TempDir()
	dir, quadletDir = filepath.Join(root, "enrollment"), filepath.Join(root, "quadlets")
	must(t, os.CopyFS(quadletDir, os.DirFS(quadlets)))
	for name, content := range files {
		f := filepath.Join(dir, name)
		if strings.HasPrefix(name, "quadlets/") {
			f = filepath.Join(root, name)
		}
		must(t, os.MkdirAll(filepath.Dir(f), 0o700))
		must(t, os.WriteFile(f, []byte(content), 0o600))
	}
	return dir, quadletDir
}

func readFile(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	must(t, err)
	return b
}

func TestEnrollmentCases(t *testing.T) {
	files, err := filepath.Glob("testdata/enrollment/*.txt")
	must(t, err)
	if len(files) < 7 {
		t.Fatalf("only %d case files", len(files))
	}
	for _, file := range files {
		topic := strings.TrimSuffix(filepath.Base(file), ".txt")
		head, cases := readEnrollmentCases(t, file)
		for i, tt := range cases {
			t.Run(topic+"/"+tt.name, func(t *testing.T) {
				dir, quadletDir := writeCase(t, tt.files)
				all, err := readEnrollments(dir, enrollOptions{quadlets: quadletDir})
				must(t, err)
				e, ok := all["hello"]
				if !ok || len(all) != 1 {
					t.Fatalf("read %v", slices.Collect(maps.Keys(all)))
				}
				got := ""
				if e.Err != nil {
					got = strings.NewReplacer(dir+"/", "", filepath.Dir(dir)+"/", "").Replace(e.Err.Error())
				}
				if *update {
					cases[i].want = got
				} else if got != tt.want {
					t.Errorf("got\n%s\nwant\n%s", got, tt.want)
				}
				if (got == "") != (topic == "good") {
					t.Errorf("a case of %s ended with %q", topic, got)
				}
				for line := range strings.Lines(got) {
					if !regexp.MustCompile(`^[a-z/.-]+(:\d+)?: .`).MatchString(line) {
						t.Errorf("no file in %q", line)
					}
				}
				if got == "" {
					checkAccepted(t, e)
				}
			})
		}
		if *update {
			updateCases(t, file, head, cases)
		}
	}
}

func updateCases(t *testing.T, file, head string, cases []enrollmentCase) {
	text := string(readFile(t, file))
	var b strings.Builder
	b.WriteString(head)
	rest := strings.TrimPrefix(text, head)
	for i, c := range strings.Split(strings.TrimPrefix(rest, "=== "), "\n=== ") {
		body, _, _ := strings.Cut(c+"\n", "\n--- want\n")
		fmt.Fprintf(&b, "=== %s\n--- want\n", body)
		if cases[i].want != "" {
			fmt.Fprintln(&b, cases[i].want)
		}
		if i < len(cases)-1 {
			b.WriteByte('\n')
		}
	}
	must(t, os.WriteFile(file, []byte(b.String()), 0o644))
}

// checkAccepted checks what must hold of every enrollment without an error.
func checkAccepted(t testing.TB, e enrolled) {
	t.Helper()
	first, err := json.MarshalIndent(e.enrollment, "", "  ")
	must(t, err)
	again, _, err := decodeEnrollment("again.json", first)
	if err != nil || again != e.enrollment {
		t.Errorf("encoded form is not read back: %v\n%s", err, first)
	}
	var plain enrollment
	must(t, json.Unmarshal(first, &plain))
	if plain != e.enrollment {
		t.Errorf("encoded form is not read back by encoding/json: %s", first)
	}

	id := unitIdentity{DataID: "d1", Service: "hello", Generation: 3, Operation: "op1", Image: e.Repository + "@sha256:" + strings.Repeat("a", 64)}
	promoted := renderUnit(e, id)
	candidate := candidateForm(promoted)
	for _, unit := range [][]byte{promoted, candidate} {
		must(t, checkUnitText(unit))
		got, ok := parseMarker(unit)
		want := id
		want.Image = ""
		if !ok || got != want {
			t.Errorf("marker %v %v", got, ok)
		}
		f := parser.NewUnitFile()
		must(t, f.Parse(string(unit)))
		if image, _ := f.Lookup("Container", "Image"); image != id.Image {
			t.Errorf("Image=%s", image)
		}
		labels, err := f.LookupAllKeyVal("Container", "Label")
		must(t, err)
		for k, want := range map[string]string{"toad.service": "hello", "toad.generation": "3", "toad.operation": "op1"} {
			if v := labels[k]; v == nil || *v != want {
				t.Errorf("label %s is not %q", k, want)
			}
		}
	}
	// The two forms differ in [Install] only.
	p, c := parser.NewUnitFile(), parser.NewUnitFile()
	must(t, p.Parse(string(promoted)))
	must(t, c.Parse(string(candidate)))
	if c.HasGroup("Install") {
		t.Errorf("candidate has [Install]:\n%s", candidate)
	}
	p.RemoveGroup("Install")
	if !slices.Equal(p.ListGroups(), c.ListGroups()) && !sameSet(p.ListGroups(), c.ListGroups()) {
		t.Errorf("sections %q, in the candidate %q", p.ListGroups(), c.ListGroups())
	}
	for _, g := range p.ListGroups() {
		for _, k := range p.ListKeys(g) {
			if !slices.Equal(p.LookupAllRaw(g, k), c.LookupAllRaw(g, k)) {
				t.Errorf("[%s] %s= differs in the candidate", g, k)
			}
		}
	}
}

func sameSet(a, b []string) bool {
	a, b = slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	return slices.Equal(a, b)
}

func TestSample(t *testing.T) {
	all, err := readEnrollments(okDir, enrollOptions{quadlets: quadlets})
	must(t, err)
	e := all["hello"]
	must(t, e.Err)
	if e.ContainerName != "hello" || e.NetworkName != "apps" || len(e.Hash) != 64 || serviceName(e.Unit) != "hello.service" {
		t.Errorf("%+v", e)
	}
	// The sample is in the form that Toad itself writes.
	b, err := json.MarshalIndent(e.enrollment, "", "  ")
	must(t, err)
	if got := string(b) + "\n"; got != string(readFile(t, okDir+"/hello.json")) {
		t.Errorf("encoded again:\n%s", got)
	}
}

func TestSizesAndDurations(t *testing.T) {
	for _, tt := range []struct{ in, out string }{
		{`"4GiB"`, `"4GiB"`}, {`"4096MiB"`, `"4GiB"`}, {`"1025KiB"`, `"1025KiB"`}, {`"5"`, `5`}, {`5`, `5`},
		{`1024`, `"1KiB"`}, {`0`, `0`}, {`"8388607TiB"`, `"8388607TiB"`},
		{`"8388608TiB"`, ``}, {`-1`, ``}, {`""`, ``}, {`"GiB"`, ``}, {`"4GB"`, ``}, {`"1.5GiB"`, ``}, {`"4 GiB"`, ``},
		{`1e3`, ``}, {`null`, ``}, {`true`, ``}, {`{}`, ``}, {`9223372036854775808`, ``},
	} {
		var n byteSize
		err := n.UnmarshalJSON([]byte(tt.in))
		if out, _ := json.Marshal(n); (err != nil) != (tt.out == "") || err == nil && string(out) != tt.out {
			t.Errorf("size %s: %s, %v; want %s", tt.in, out, err, tt.out)
		}
	}
	for _, tt := range []struct{ in, out string }{
		{`"2m"`, `"2m"`}, {`"60s"`, `"1m"`}, {`"1h"`, `"1h"`}, {`"1h0m5s"`, `"1h0m5s"`}, {`"90s"`, `"1m30s"`},
		{`"10m"`, `"10m"`}, {`"1h10m"`, `"1h10m"`}, {`"100ms"`, `"100ms"`}, {`"0s"`, `"0s"`}, {`"-2m"`, `"-2m"`},
		{`5`, ``}, {`null`, ``}, {`"5"`, ``}, {`""`, ``}, {`"1d"`, ``},
	} {
		var d duration
		err := d.UnmarshalJSON([]byte(tt.in))
		if out, _ := json.Marshal(d); (err != nil) != (tt.out == "") || err == nil && string(out) != tt.out {
			t.Errorf("duration %s: %s, %v; want %s", tt.in, out, err, tt.out)
		}
	}
}

func TestTimeSpan(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"90": 90 * time.Second, "1min 30s": 90 * time.Second, "1min30s": 90 * time.Second, "1 min 30": 90 * time.Second,
		"2.5s": 2500 * time.Millisecond, ".5s": 500 * time.Millisecond, "300ms": 300 * time.Millisecond,
		"1h 2minutes 3seconds": time.Hour + 2*time.Minute + 3*time.Second, " 5 ": 5 * time.Second, "20us": 20 * time.Microsecond,
		"1w": 7 * 24 * time.Hour,
		"":   0, "infinity": 0, "0": 0, "0s": 0, "banana": 0, "5 bananas": 0, "-5": 0, "5M": 0, "1y": 0, "1e3": 0, "1.2.3": 0,
		"999999999999999999999w": 0, "%T": 0,
	} {
		got, err := parseTimeSpan(in)
		if got != want || (err != nil) != (want == 0) {
			t.Errorf("%q is %v, %v; want %v", in, got, err, want)
		}
	}
}

func TestConflicts(t *testing.T) {
	// services: name → unit, container name
	type names = map[string][2]string
	for _, tt := range []struct {
		name     string
		services names
		claims   map[string]claim
		reserved []string
		want     map[string]string // service → part of its error
	}{
		{name: "apart", services: names{"a": {"a", "a"}, "b": {"b", ""}}},
		{name: "one unit, no revision", services: names{"a": {"x", "a"}, "b": {"x", "a"}},
			want: map[string]string{"a": `unit "x.container" is also that of service b`, "b": `unit "x.container" is also that of service a`}},
		{name: "one container name, no revision", services: names{"a": {"a", "x"}, "b": {"b", "x"}},
			want: map[string]string{"a": `container name "x" is also that of service b`, "b": `container name "x" is also that of service a`}},
		{name: "a default name", services: names{"a": {"x", ""}, "b": {"b", "systemd-x"}},
			want: map[string]string{"a": `container name "systemd-x" is also`, "b": `container name "systemd-x" is also`}},
		{name: "who has a revision keeps it", services: names{"a": {"a", "x"}, "b": {"b", "x"}}, claims: map[string]claim{"b": {"b.container", "x"}},
			want: map[string]string{"a": `container name "x" is also that of service b`}},
		{name: "even without a file", services: names{"a": {"x", "a"}}, claims: map[string]claim{"gone": {"x.container", "g"}},
			want: map[string]string{"a": `unit "x.container" is also that of service gone`}},
		{name: "a revision's unit changed", services: names{"a": {"x", "c"}}, claims: map[string]claim{"a": {"a.container", "c"}},
			want: map[string]string{"a": `the unit is "x.container", but this service runs as "a.container": change it back`}},
		{name: "a revision's container changed", services: names{"a": {"a", "x"}}, claims: map[string]claim{"a": {"a.container", "c"}},
			want: map[string]string{"a": `the container name is "x", but this service runs as "c"`}},
		{name: "the old name stays taken", services: names{"a": {"x", "c"}, "b": {"a", "b"}}, claims: map[string]claim{"a": {"a.container", "c"}},
			want: map[string]string{"a": `but this service runs as`, "b": `unit "a.container" is also that of service a`}},
		{name: "reserved", services: names{"a": {"toad", "a"}, "b": {"b", "zot"}, "c": {"c", "systemd-caddy"}, "d": {"zot2", "d"}}, reserved: []string{"toad", "zot", "caddy"},
			want: map[string]string{"a": `unit "toad.container" is reserved`, "b": `container name "zot" is reserved`, "c": `container name "systemd-caddy" is reserved`}},
		{name: "Toad's own prefix", services: names{"a": {"toad-check-b", "a"}, "b": {"b", "toad-output-a"}, "c": {"c", "systemd-toad-x"}, "toad-d": {"d", "d"}, "toads": {"toads", "toads"}, "f": {"f-toad-x", "f"}},
			want: map[string]string{"a": `unit "toad-check-b.container" is reserved, as all that begins with toad-`, "b": `container name "toad-output-a" is reserved`,
				"c": `container name "systemd-toad-x" is reserved`, "toad-d": `the service "toad-d" is reserved`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for s, n := range tt.services {
				writeService(t, dir, s, n[0], n[1])
			}
			all, err := readEnrollments(dir, enrollOptions{quadlets: quadlets, claims: tt.claims, reserved: tt.reserved})
			must(t, err)
			for s := range tt.services {
				want := tt.want[s]
				if err := all[s].Err; (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("%s: %v; want %q", s, err, want)
				}
			}
		})
	}
}

// writeService writes a good enrollment of that name.
func writeService(t testing.TB, dir, service, unit, container string) {
	t.Helper()
	j := string(readFile(t, okDir+"/hello.json"))
	j = strings.Replace(j, `"service": "hello"`, `"service": "`+service+`"`, 1)
	j = strings.Replace(j, `"hello.container"`, `"`+unit+`.container"`, 1)
	c := strings.Replace(string(readFile(t, okDir+"/hello.container")), "ContainerName=hello", "ContainerName="+container, 1)
	must(t, os.WriteFile(filepath.Join(dir, service+".json"), []byte(j), 0o600))
	must(t, os.WriteFile(filepath.Join(dir, unit+".container"), []byte(c), 0o600))
}

func TestBrokenDisablesOnlyItself(t *testing.T) {
	dir := t.TempDir()
	writeService(t, dir, "good", "good", "good")
	writeService(t, dir, "torn", "torn", "torn")
	must(t, os.WriteFile(filepath.Join(dir, "torn.json"), []byte(`{"version": 1`), 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "Not A Service.json"), nil, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, ".hidden.json"), nil, 0o600))
	must(t, os.Mkdir(filepath.Join(dir, "folder.json"), 0o700))
	must(t, os.WriteFile(filepath.Join(dir, "huge.json"), make([]byte, maxEnrollmentFile+1), 0o600))
	all, err := readEnrollments(dir, enrollOptions{quadlets: quadlets})
	must(t, err)
	if len(all) != 5 || all["good"].Err != nil {
		t.Errorf("%v", all)
	}
	for s, want := range map[string]string{"torn": "torn.json:1: not JSON", "Not A Service": "is no service identifier", "folder": "no regular file", "huge": "no regular file of at most 1MiB"} {
		if err := all[s].Err; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", s, err)
		}
	}
	if _, err := readEnrollments(filepath.Join(dir, "nowhere"), enrollOptions{}); err == nil {
		t.Error("a missing directory is no error")
	}
	if _, err := readEnrollments(dir, enrollOptions{quadlets: filepath.Join(dir, "nowhere")}); err == nil {
		t.Error("a missing Quadlet directory is no error")
	}
}

func TestForbiddenPaths(t *testing.T) {
	for _, tt := range []struct {
		volume, data, home string
		refused            bool
	}{
		{"/var/lib/toad", "/var/lib/toad/.local/share/toad", "", true},
		{"%h", "/var/lib/toad/.local/share/toad", "", true},
		{"%h/app", "/var/lib/toad/.local/share/toad", "", false},
		{"/home/toad", "/var/lib/toad/.local/share/toad", "", false},
		{"%h", "/srv/toad", "/home/toad", false},
		{"%h", "/srv/toad", "/srv", true},
		{"%h/x", "/home/op/toad", "", false},
		{"/srv/toadstool", "/srv/toad", "", false},
	} {
		files := map[string]string{}
		for _, f := range []string{"hello.json", "hello.container"} {
			files[f] = string(readFile(t, filepath.Join(okDir, f)))
		}
		edit(t, files, "[Container]\nVolume="+tt.volume+":/x\n")
		dir, q := writeCase(t, files)
		all, err := readEnrollments(dir, enrollOptions{quadlets: q, forbiddenPaths: []string{tt.data}, home: tt.home})
		must(t, err)
		if err := all["hello"].Err; (err != nil) != tt.refused {
			t.Errorf("%+v: %v", tt, err)
		}
	}
}

func TestVolumes(t *testing.T) {
	unit := []byte("[Container]\nVolume=gone:/gone\nVolume=\nVolume=a:/data/\nVolume=/anonymous\nMount=type=bind,src=/srv,dst=/srv\n" +
		"Mount=type=tmpfs,destination=/scratch\nTmpfs=/tmp:size=1M\nPodmanArgs=--tmpfs /cache:rw\n")
	covered := coveredVolumes(unit)
	if want := []string{"/anonymous", "/cache", "/data", "/scratch", "/srv", "/tmp"}; !slices.Equal(covered, want) {
		t.Errorf("covered %q", covered)
	}
	if got := uncovered([]string{"/data", "srv/", "/data/sub", "/gone", "/other"}, covered); !slices.Equal(got, []string{"/data/sub", "/gone", "/other"}) {
		t.Errorf("uncovered %q", got)
	}
	unit = []byte("[Container]\nPodmanArgs=--image-volume=ignore\n")
	if got := uncovered([]string{"/data"}, coveredVolumes(unit)); got != nil {
		t.Errorf("uncovered although ignored: %q", got)
	}
}

func TestReferenced(t *testing.T) {
	unit := []byte("[Container]\nNetwork=apps.network\nNetwork=back.network:ip=10.0.0.9\nNetwork=nowhere.network\n" +
		"Secret=password,type=env\nSecret=key cert\nPodmanArgs=--secret extra\n" +
		"Volume=data.volume:/data\nVolume=plain:/plain\nVolume=/srv:/srv\nVolume=%N-x:/x\nMount=type=volume,source=gone.volume,dst=/y\nMount=type=bind,src=/etc,dst=/z\n")
	networks, secrets, volumes := referenced(unit, quadlets)
	for _, tt := range []struct{ got, want []string }{
		{networks, []string{"apps", "nowhere.network", "systemd-back"}},
		{secrets, []string{"cert", "extra", "key", "password"}},
		{volumes, []string{"gone.volume", "hello-data", "plain"}},
	} {
		if !slices.Equal(tt.got, tt.want) {
			t.Errorf("got %q, want %q", tt.got, tt.want)
		}
	}
}

// Golden units: testdata/units/NAME.template is rendered to NAME.promoted.container and
// NAME.candidate.container.

func goldenUnits(t testing.TB) []string {
	templates, err := filepath.Glob("testdata/units/*.template")
	must(t, err)
	if len(templates) == 0 {
		t.Fatal("no templates")
	}
	return templates
}

func goldenIdentity(name string) unitIdentity {
	return unitIdentity{DataID: "6f1d2c", Service: name, Generation: 7, Operation: "01jzx6q4b0t5v8w2y4a6c8e0g2",
		Image: "registry.example.org/apps/" + name + "@sha256:" + strings.Repeat("0123456789abcdef", 4)}
}

func TestRenderUnit(t *testing.T) {
	for _, file := range goldenUnits(t) {
		name := strings.TrimSuffix(filepath.Base(file), ".template")
		t.Run(name, func(t *testing.T) {
			promoted := renderUnit(enrolled{Template: readFile(t, file)}, goldenIdentity(name))
			golden(t, "testdata/units/"+name+".promoted.container", promoted)
			golden(t, "testdata/units/"+name+".candidate.container", candidateForm(promoted))
			checkAccepted(t, enrolled{enrollment: sampleEnrollment(t), Template: readFile(t, file)})
		})
	}
}

func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	if *update {
		must(t, os.WriteFile(file, got, 0o644))
	}
	if want := readFile(t, file); !bytes.Equal(got, want) {
		t.Errorf("%s differs:\n%s", file, got)
	}
}

func sampleEnrollment(t testing.TB) enrollment {
	e, _, err := decodeEnrollment("hello.json", readFile(t, okDir+"/hello.json"))
	must(t, err)
	return e
}

func TestInstallTargets(t *testing.T) {
	unit := []byte("[Install]\nWantedBy=default.target a.target\n[Container]\nImage=x\n[Install]\nWantedBy=\"b.target\"\nRequiredBy=c.service\n")
	if got, want := installTargets(unit), []string{"default.target", "a.target", "b.target", "c.service"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := installTargets(candidateForm(unit)); len(got) > 0 {
		t.Errorf("the candidate's: %q", got)
	}
}

func TestCheckUnitText(t *testing.T) {
	good := renderUnit(enrolled{Template: readFile(t, okDir+"/hello.container")}, goldenIdentity("hello"))
	must(t, checkUnitText(good))
	for name, unit := range map[string]string{
		"empty":                   "",
		"cut off":                 string(good[:len(good)/2]),
		"without marker":          string(good[1:]),
		"no image by digest":      strings.Replace(string(good), "@sha256:", ":", 1),
		"junk":                    string(good) + "junk\n",
		"unclosed section":        string(good) + "[Container\n",
		"control character":       string(good) + "# \x00\n",
		"not UTF-8":               string(good) + "# \xff\n",
		"continued":               string(good) + "Label=a=b \\",
		"a mount without source":  string(good) + "Mount=type=volume,destination=/x\n",
		"a mount not to be split": string(good) + "Mount=type=bind,\\\"src=/x\n",
	} {
		if checkUnitText([]byte(unit)) == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for _, line := range []string{"", "# toad", "# toad data=a service=b generation=x operation=c", "# toad data=a service=b generation=1 operation=c d",
		" # toad data=a service=b generation=1 operation=c", "# toad data=a service=b generation=99999999999999999999 operation=c"} {
		if id, ok := parseMarker([]byte(line + "\n[Container]\n")); ok {
			t.Errorf("%q is a marker: %v", line, id)
		}
	}
}

// The real generator, where there is one: TOAD_TEST_QUADLET names it, or it is installed.
func generator(t *testing.T) string {
	for _, g := range []string{os.Getenv("TOAD_TEST_QUADLET"), "/usr/lib/systemd/user-generators/podman-user-generator"} {
		if _, err := os.Stat(g); err == nil {
			return g
		}
	}
	t.Skip("no Quadlet generator here")
	return ""
}

// generate returns what the generator makes of a directory's units, by service name.
func generate(t *testing.T, dir string) (units map[string]string, said string) {
	c := exec.Command(generator(t), "--user", "--dryrun")
	c.Env = append(os.Environ(), "QUADLET_UNIT_DIRS="+dir)
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	if err := c.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatal(err)
	}
	units = map[string]string{}
	for part := range strings.SplitSeq("\n"+stdout.String(), "\n---") {
		if name, text, ok := strings.Cut(part, "---\n"); ok {
			units[name] = text
		}
	}
	return units, stderr.String()
}

func TestGenerator(t *testing.T) {
	_ = generator(t)
	t.Run("golden units", func(t *testing.T) {
		dir := t.TempDir()
		must(t, os.CopyFS(dir, os.DirFS(quadlets)))
		for _, file := range goldenUnits(t) {
			name := strings.TrimSuffix(filepath.Base(file), ".template")
			for _, form := range []string{"promoted", "candidate"} {
				d := filepath.Join(dir, name+form)
				must(t, os.Mkdir(d, 0o700))
				must(t, os.WriteFile(filepath.Join(d, name+"-"+form+".container"), readFile(t, "testdata/units/"+name+"."+form+".container"), 0o600))
			}
		}
		units, said := generate(t, dir)
		for _, file := range goldenUnits(t) {
			name := strings.TrimSuffix(filepath.Base(file), ".template")
			for _, form := range []string{"promoted", "candidate"} {
				text, ok := units[name+"-"+form+".service"]
				if !ok {
					t.Errorf("%s is not generated in its %s form:\n%s", name, form, said)
					continue
				}
				checkGenerated(t, text, goldenIdentity(name))
				if form == "candidate" && strings.Contains(text, "\n[Install]\n") {
					t.Errorf("%s: the candidate has [Install]", name)
				}
			}
		}
	})
	t.Run("accepted templates", func(t *testing.T) {
		_, cases := readEnrollmentCases(t, "testdata/enrollment/good.txt")
		for _, tt := range cases {
			dir, quadletDir := writeCase(t, tt.files)
			all, err := readEnrollments(dir, enrollOptions{quadlets: quadletDir})
			must(t, err)
			e := all["hello"]
			must(t, e.Err)
			must(t, os.Mkdir(quadletDir+"/hello", 0o700))
			must(t, os.WriteFile(quadletDir+"/hello/hello.container", renderUnit(e, goldenIdentity("hello")), 0o600))
			units, said := generate(t, quadletDir)
			text, ok := units["hello.service"]
			if !ok {
				t.Errorf("%s: not generated:\n%s", tt.name, said)
				continue
			}
			checkGenerated(t, text, goldenIdentity("hello"))
			name := strings.ReplaceAll(e.ContainerName, "systemd-hello", "systemd-%N")
			if !strings.Contains(text, " run --name "+name+" ") && !strings.Contains(text, "podman --log-level") {
				t.Errorf("%s: container name is not %s:\n%s", tt.name, name, text)
			}
			if !strings.Contains(text, " --network "+e.NetworkName+" ") {
				t.Errorf("%s: network is not %s:\n%s", tt.name, e.NetworkName, text)
			}
		}
	})
	t.Run("every drop-in that is found is merged, and no other", func(t *testing.T) {
		dir := t.TempDir()
		must(t, os.CopyFS(dir, os.DirFS(quadlets)))
		for i, d := range []string{"a-b.container.d", "a-.container.d", "container.d", "sub/a-b.container.d", ".dot/a-b.container.d",
			"b.container.d", "a-b-.container.d", "x.d/a-b.container.d", "a-b.service.d"} {
			must(t, os.MkdirAll(filepath.Join(dir, d), 0o700))
			must(t, os.WriteFile(filepath.Join(dir, d, fmt.Sprintf("%d.conf", i)), fmt.Appendf(nil, "[Container]\nEnvironment=D%d=1\n", i), 0o600))
		}
		must(t, os.WriteFile(filepath.Join(dir, "a-b.container"), []byte("[Container]\nImage=registry.example.org/x\n"), 0o600))
		units, said := generate(t, dir)
		tree, err := readQuadletTree(dir)
		must(t, err)
		found := tree.dropins("a-b.container")
		if len(found) != 5 {
			t.Errorf("found %q", found)
		}
		for i := range 9 {
			merged := strings.Contains(units["a-b.service"], fmt.Sprintf("--env D%d=1", i))
			listed := slices.ContainsFunc(found, func(f string) bool { return strings.HasSuffix(f, fmt.Sprintf("/%d.conf", i)) })
			if merged != listed {
				t.Errorf("drop-in %d: merged %v, found %v\n%s", i, merged, listed, said)
			}
		}
	})
}

func checkGenerated(t *testing.T, text string, id unitIdentity) {
	t.Helper()
	start := ""
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "ExecStart=") {
			start = line
		}
	}
	for _, want := range []string{" --pull missing ", " " + id.Image, "--label toad.service=" + id.Service + " ", "--label toad.generation=7 ", "--label toad.operation=" + id.Operation + " "} {
		if !strings.Contains(start, want) {
			t.Errorf("no %q in %s", want, start)
		}
	}
}

// The enrollments in force.

func TestInForce(t *testing.T) {
	newDir := func(t *testing.T) (dir string, s *enrollments) {
		dir = t.TempDir()
		writeService(t, dir, "hello", "hello", "hello")
		writeService(t, dir, "other", "other", "other")
		return dir, newEnrollments(dir, func() enrollOptions { return enrollOptions{quadlets: quadlets} })
	}
	claimed := func(service, unit, container string) func() enrollOptions {
		return func() enrollOptions {
			return enrollOptions{quadlets: quadlets, claims: map[string]claim{service: {unit, container}}}
		}
	}
	t.Run("torn for a moment", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			dir, s := newDir(t)
			good, err := s.get("hello")
			must(t, err)
			file := filepath.Join(dir, "hello.json")
			whole := readFile(t, file)
			for _, torn := range []func() error{
				func() error { return os.WriteFile(file, whole[:20], 0o600) },
				func() error { return os.Remove(file) },
				func() error { return os.Remove(filepath.Join(dir, "hello.container")) },
			} {
				must(t, torn())
				for range 10 {
					if e, err := s.get("hello"); err != nil || e.Hash != good.Hash {
						t.Fatalf("within the moment: %v", err)
					}
					if e := s.all()["hello"]; e.Err != nil {
						t.Fatal(e.Err)
					}
					time.Sleep(time.Second - time.Millisecond)
				}
				time.Sleep(10 * time.Millisecond)
				e, err := s.get("hello")
				if err == nil || e.Err != err || e.Service != "hello" {
					t.Fatalf("after the moment: %v %v", e, err)
				}
				time.Sleep(time.Hour)
				if _, err := s.get("hello"); err == nil {
					t.Fatal("it came back by itself")
				}
				if _, err := s.get("other"); err != nil {
					t.Fatalf("another service: %v", err)
				}
				writeService(t, dir, "hello", "hello", "hello")
				if e, err := s.get("hello"); err != nil || e.Hash != good.Hash {
					t.Fatalf("repaired: %v", err)
				}
			}
		})
	})
	t.Run("gone", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			dir, s := newDir(t)
			if _, err := s.get("nobody"); !errors.Is(err, errNotFound) {
				t.Error(err)
			}
			must(t, s.all()["hello"].Err)
			must(t, os.Remove(filepath.Join(dir, "hello.json")))
			s.all("hello")
			time.Sleep(moment)
			if all := s.all(); len(all) != 1 {
				t.Errorf("all: %v", all)
			}
			if _, err := s.get("hello"); !errors.Is(err, errNotFound) || !strings.Contains(err.Error(), "enrollment file is gone") {
				t.Error(err)
			}
			if e, ok := s.all("hello")["hello"]; !ok || !errors.Is(e.Err, errNotFound) {
				t.Errorf("a service that is known is forgotten: %v", e.Err)
			}
			if _, ok := s.all()["hello"]; ok {
				t.Error("one that nobody knows is still there")
			}
		})
	})
	t.Run("the directory away", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			dir, s := newDir(t)
			s.all()
			must(t, os.Rename(dir, dir+".away"))
			if _, err := s.get("hello"); err != nil {
				t.Error(err)
			}
			time.Sleep(moment)
			if _, err := s.get("hello"); err == nil {
				t.Error("still in force")
			}
			must(t, os.Rename(dir+".away", dir))
			if _, err := s.get("hello"); err != nil {
				t.Error(err)
			}
		})
	})
	t.Run("a change is in force at once", func(t *testing.T) {
		dir, s := newDir(t)
		old, err := s.get("hello")
		must(t, err)
		for i := range 50 { // as fast as can be, of one size
			name := fmt.Sprintf("hello%02d", i)
			writeService(t, dir, "hello", "hello", name)
			e, err := s.get("hello")
			must(t, err)
			if e.ContainerName != name || e.Hash == old.Hash {
				t.Fatalf("stale: %s, want %s", e.ContainerName, name)
			}
			old = e
		}
	})
	t.Run("nothing is read again for nothing", func(t *testing.T) {
		dir, s := newDir(t)
		time.Sleep(150 * time.Millisecond)
		first, err := s.get("hello")
		must(t, err)
		second, err := s.get("hello")
		must(t, err)
		if &first.Template[0] != &second.Template[0] {
			t.Error("read again")
		}
		must(t, os.Chtimes(filepath.Join(dir, "hello.json"), time.Time{}, time.Now().Add(-time.Hour)))
		third, err := s.get("hello")
		must(t, err)
		if &first.Template[0] == &third.Template[0] {
			t.Error("not read again")
		}
	})
	t.Run("gone for long before anybody looked", func(t *testing.T) {
		dir, s := newDir(t)
		s.opts = func() enrollOptions { return enrollOptions{} }
		_, err := s.get("hello")
		must(t, err)
		must(t, os.Remove(filepath.Join(dir, "hello.json")))
		for _, f := range []string{".", "hello.container", "other.json", "other.container"} {
			must(t, os.Chtimes(filepath.Join(dir, f), time.Time{}, time.Now().Add(-time.Minute)))
		}
		if _, err := s.get("hello"); err == nil {
			t.Error("in force a minute after")
		}
	})
	t.Run("claims", func(t *testing.T) {
		_, s := newDir(t)
		_, err := s.get("hello")
		must(t, err)
		s.opts = claimed("third", "hello.container", "third")
		s.get("hello")
		if e := s.read["hello"]; e.Err == nil {
			t.Error("a claim is not seen")
		}
	})
	t.Run("at once from everywhere", func(t *testing.T) {
		dir, s := newDir(t)
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for range 20 {
					s.get("hello")
					s.all()
					s.get(fmt.Sprintf("s%d", i))
				}
			})
		}
		for i := range 20 {
			writeService(t, dir, "hello", "hello", fmt.Sprintf("c%d", i))
		}
		wg.Wait()
	})
}

func TestCheckDirectory(t *testing.T) {
	var b strings.Builder
	if !checkDirectory(&b, okDir, enrollOptions{}) || b.String() != "hello: ok\nnote: networks and drop-ins were not checked; --quadlets DIR checks them too\n" {
		t.Errorf("%s", b.String())
	}
	b.Reset()
	if !checkDirectory(&b, okDir, enrollOptions{quadlets: quadlets}) || b.String() != "hello: ok\n" {
		t.Errorf("%s", b.String())
	}
	dir := t.TempDir()
	b.Reset()
	if checkDirectory(&b, dir, enrollOptions{quadlets: quadlets}) || !strings.Contains(b.String(), "there is no enrollment") {
		t.Errorf("%s", b.String())
	}
	writeService(t, dir, "a", "x", "a")
	writeService(t, dir, "b", "x", "b")
	b.Reset()
	if checkDirectory(&b, dir, enrollOptions{quadlets: quadlets}) || strings.Count(b.String(), "problem: ") != 4 {
		t.Errorf("%s", b.String())
	}
	b.Reset()
	if checkDirectory(&b, filepath.Join(dir, "nowhere"), enrollOptions{}) {
		t.Errorf("%s", b.String())
	}
}

func FuzzEnrollment(f *testing.F) {
	files, err := filepath.Glob("testdata/enrollment/*.txt")
	must(f, err)
	for _, file := range files {
		_, cases := readEnrollmentCases(f, file)
		for _, tt := range cases {
			f.Add([]byte(tt.files["hello.json"]), []byte(tt.files["hello.container"]))
		}
	}
	tree, err := readQuadletTree(quadlets)
	must(f, err)
	f.Fuzz(func(t *testing.T, declaration, template []byte) {
		declared, lines, err := decodeEnrollment("hello.json", declaration)
		if err == nil {
			b, err := json.Marshal(declared)
			must(t, err)
			again, _, err := decodeEnrollment("again.json", b)
			if err == nil && again != declared {
				t.Errorf("decoded again: %+v, before %+v", again, declared)
			}
		}
		// The lines are the generator's own.
		if u, err := scanUnit(template); err == nil {
			p := parser.NewUnitFile()
			must(t, p.Parse(string(template)))
			n := 0
			for _, g := range p.ListGroups() {
				for _, k := range p.ListKeys(g) {
					var values []string
					for _, l := range u.values(g, k) {
						values = append(values, l.value)
					}
					if want := p.LookupAllRaw(g, k); !slices.Equal(values, want) {
						t.Errorf("[%s] %s= is %q, the generator's %q", g, k, values, want)
					}
					n++
				}
			}
			keys := map[[2]string]bool{}
			for _, l := range u.lines {
				if l.key != "" {
					keys[[2]string{l.group, l.key}] = true
				}
			}
			if n != len(keys) {
				t.Errorf("%d keys, the generator's %d", len(keys), n)
			}
		}
		e := enrolled{enrollment: declared, lines: lines, file: "hello.json", Template: template}
		p := &problems{}
		if err != nil {
			e.enrollment = sampleEnrollment(t)
		} else {
			e.checkFields(p)
		}
		e.checkTemplate(p, "hello.container", tree, enrollOptions{})
		coveredVolumes(template)
		referenced(template, quadlets)
		candidateForm(template)
		if len(p.errs) == 0 {
			checkAccepted(t, e)
		}
	})
}
