package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containers/podman/v5/pkg/systemd/parser"
	"github.com/google/go-containerregistry/pkg/name"
)

// The fuzz targets of what reads files, requests and images, and of the renderer of units. testdata/test
// runs each for ten seconds; what once broke one is kept in testdata/fuzz.

// recordKinds are the records there are, each with its check.
var recordKinds = []struct {
	golden string // of testdata/state/v1
	empty  func() any
}{
	{"service-", func() any { return &record{} }},
	{"revision", func() any { return &revision{} }},
	{"operation", func() any { return &archived{} }},
	{"key", func() any { return &keyFile{} }},
	{"tokens", func() any { return &tokenFile{} }},
	{"events.head", func() any { return &ownRecord{} }},
}

// goldenFiles are the golden records of a kind.
func goldenFiles(t testing.TB, kind int) [][]byte {
	paths, err := filepath.Glob(filepath.Join(goldenDir, recordKinds[kind].golden+"*.json"))
	must(t, err)
	if len(paths) == 0 {
		t.Fatalf("no golden record of %s", recordKinds[kind].golden)
	}
	var all [][]byte
	for _, path := range paths {
		all = append(all, readFile(t, path))
	}
	return all
}

// sound decodes and checks a record as whoever reads it does.
func sound(kind int, b []byte) (any, error) {
	v := recordKinds[kind].empty()
	if err := decodeRecord(b, v); err != nil {
		return nil, err
	}
	switch v := v.(type) {
	case *record:
		return v, v.check()
	case *tokenFile:
		return v, v.check(v.Service)
	}
	return v, nil
}

// resealed is a text with the checksum that a record of that text has.
func resealed(b []byte) []byte {
	i := bytes.LastIndex(b, []byte("  \"sha256\": "))
	if i < 0 {
		i = len(b)
	}
	return fmt.Appendf(b[:i:i], "  \"sha256\": %q\n}\n", strings.TrimPrefix(sha(b[:i]), "sha256:"))
}

// FuzzRecord: a record that decodes and is sound is byte for byte what it would be written as, even if
// somebody gave it the right checksum; and no byte of a golden one can be another.
func FuzzRecord(f *testing.F) {
	var golden [][][]byte
	for kind := range recordKinds {
		golden = append(golden, goldenFiles(f, kind))
		for i, b := range golden[kind] {
			f.Add(uint8(kind), b, uint16(i*100), uint8(1<<(i%8)))
		}
	}
	f.Fuzz(func(t *testing.T, n uint8, b []byte, at uint16, flip uint8) {
		kind := int(n) % len(recordKinds)
		for _, b := range [][]byte{b, resealed(b)} {
			v, err := sound(kind, b)
			if err != nil {
				if !errors.Is(err, errCorrupt) {
					t.Errorf("%q: %v", b, err)
				}
				continue
			}
			if again, err := encodeRecord(v); err != nil || !bytes.Equal(again, b) {
				t.Errorf("%v\n%s\nis written again as\n%s", err, b, again)
			}
			if r, ok := v.(*record); ok {
				if c, err := encodeRecord(r.clone()); err != nil || !bytes.Equal(c, b) {
					t.Errorf("%v\n%s\nand its copy is\n%s", err, b, c)
				}
				r.active()
				r.needs()
				r.duty()
			}
		}
		if flip == 0 {
			return
		}
		all := golden[kind]
		changed := bytes.Clone(all[int(at)%len(all)])
		changed[int(at)%len(changed)] ^= flip
		if _, err := sound(kind, changed); err == nil {
			t.Errorf("byte %d is another, and the record is sound:\n%s", int(at)%len(changed), changed)
		}
	})
}

// No byte of a record can be another, and none can be missing or too many.
func TestChangedRecordsAreNotSound(t *testing.T) {
	for kind := range recordKinds {
		b := goldenFiles(t, kind)[0]
		if _, err := sound(kind, b); err != nil {
			t.Fatal(err)
		}
		for i := range b {
			flipped := bytes.Clone(b)
			flipped[i] ^= 1 << (i % 8)
			for what, changed := range map[string][]byte{"another": flipped, "missing": slices.Delete(bytes.Clone(b), i, i+1), "there twice": slices.Insert(bytes.Clone(b), i, b[i])} {
				if _, err := sound(kind, changed); !errors.Is(err, errCorrupt) {
					t.Fatalf("%s: byte %d is %s: %v", recordKinds[kind].golden, i, what, err)
				}
			}
		}
	}
	b := goldenFiles(t, 0)[0]
	for what, change := range map[string][2]string{
		"a field is missing":         {`  "held": null,` + "\n", ""},
		"a field is there twice":     {`  "held": null,`, `  "held": null,` + "\n" + `  "held": null,`},
		"a field has another name":   {`  "held": null,`, `  "Held": null,`},
		"an unknown field":           {`  "held": null,`, `  "held": null,` + "\n" + `  "hold": null,`},
		"null is a number":           {`"next_generation": `, `"next_generation": null, "x": `},
		"a space more":               {`"held": null`, `"held":  null`},
		"a version that is none yet": {`"version": 1`, `"version": 2`},
		"a version that is none":     {`"version": 1`, `"version": 0`},
		"a generation never given":   {`"next_generation": 3`, `"next_generation": 1`},
	} {
		changed := bytes.Replace(b, []byte(change[0]), []byte(change[1]), 1)
		if bytes.Equal(changed, b) {
			t.Fatalf("%s: the golden record has no %s", what, change[0])
		}
		if _, err := sound(0, resealed(changed)); !errors.Is(err, errCorrupt) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// requestKinds are the bodies of requests, with what the route demands of their form.
var requestKinds = []struct {
	empty  func() any
	fields []string
	check  func(v any) error
}{
	{func() any { return &deployRequest{} }, []string{"service", "image", "expected_generation", "idempotency_key"}, func(v any) error {
		return checkForm(v.(*deployRequest).IdempotencyKey, *v.(*deployRequest).ExpectedGeneration)
	}},
	{func() any { return &rollbackRequest{} }, []string{"expected_generation", "idempotency_key"}, func(v any) error {
		return checkForm(v.(*rollbackRequest).IdempotencyKey, *v.(*rollbackRequest).ExpectedGeneration)
	}},
	{func() any { return &reconcileRequest{} }, []string{"operation_id"}, func(any) error { return nil }},
	{func() any { return &retireRequest{} }, []string{"generation"}, func(any) error { return nil }},
	{func() any { return &fsckRequest{} }, []string{"restore"}, func(any) error { return nil }},
	{func() any { return &tokenRequest{} }, []string{"service", "label", "verbs", "expires_in_seconds?"}, func(v any) error {
		_, err := v.(*tokenRequest).check()
		return err
	}},
}

// FuzzRequest: what a route takes of a body is all that the body says: nothing in it is unknown, there
// twice, null or of another type, not within a list either. Every field is there but those that may be
// missing.
func FuzzRequest(f *testing.F) {
	for kind, bodies := range [][]string{
		{deployBody("hello", "registry.example.org/apps/hello@"+sha(nil), 1, "k"), `{"service":"a","Service":"b"}`},
		{`{"expected_generation":1,"idempotency_key":"k"}`, `{"expected_generation":-0,"idempotency_key":"k"}`, `{"expected_generation":1.0,"idempotency_key":"k"}`},
		{`{"operation_id":"` + noSuchID + `"}`, `{"operation_id":"a"}{}`, `{"operation_id":null}`},
		{`{"generation":3}`, `{"generation":3,"generation":4}`, `{"generation":9223372036854775808}`},
		{`{"restore":"services/hello/service.json"}`, `{"restore":["a"]}`},
		{`{"service":"hello","label":"ci","verbs":["read","deploy"],"expires_in_seconds":3600}`, `{"service":"hello","label":"ci","verbs":["read"]}`,
			`{"service":"hello","label":"ci","verbs":["read",null]}`, `{"service":"hello","label":"ci","verbs":null}`, `{"service":"hello","label":"ci","verbs":["read","read"]}`,
			`{"service":"hello","label":"ci","verbs":[],"expires_in_seconds":null}`, `{"service":"hello","label":"ci","verbs":["read"],"expires_in_seconds":0}`},
	} {
		for _, body := range bodies {
			f.Add(uint8(kind), []byte(body))
		}
	}
	f.Fuzz(func(t *testing.T, n uint8, body []byte) {
		kind := requestKinds[int(n)%len(requestKinds)]
		v := kind.empty()
		err := decode(httptest.NewRequest("POST", "http://toad/", bytes.NewReader(body)), v, slices.Clone(kind.fields)...)
		if err == nil {
			err = kind.check(v)
		}
		if err != nil {
			var e *apiError
			if !errors.As(err, &e) || e.Code != "invalid_request" || e.Detail == "" {
				t.Errorf("%q: %v", body, err)
			}
			return
		}
		said, names := saidBy(t, body)
		b, err := json.Marshal(v)
		must(t, err)
		if taken, _ := saidBy(t, b); !reflect.DeepEqual(said, taken) {
			t.Errorf("%q says %v, and is taken for %v", body, said, taken)
		}
		for i, name := range names {
			if slices.Contains(names[:i], name) {
				t.Errorf("%q says %q twice", body, name)
			}
			if !slices.Contains(kind.fields, name) && !slices.Contains(kind.fields, name+"?") {
				t.Errorf("%q says %q, which is unknown", body, name)
			}
		}
		for _, name := range kind.fields {
			if !strings.HasSuffix(name, "?") && !slices.Contains(names, name) {
				t.Errorf("%q does not say %q", body, name)
			}
		}
	})
}

// saidBy is an object as the plainest reader has it, whole numbers without their sign of zero, and the
// names of its fields in order.
func saidBy(t *testing.T, body []byte) (said map[string]any, names []string) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	if err := d.Decode(&said); err != nil {
		t.Fatalf("%q: %v", body, err)
	}
	for k, v := range said {
		if v == json.Number("-0") {
			said[k] = json.Number("0")
		}
	}
	d = json.NewDecoder(bytes.NewReader(body))
	for _, _ = d.Token(); d.More(); {
		t, err := d.Token()
		var value json.RawMessage
		if err != nil || d.Decode(&value) != nil {
			break
		}
		names = append(names, t.(string))
	}
	return said, names
}

// FuzzImage: a reference that a request may name leads to the repository it says and to one file of the
// layout. A manifest that is taken names each blob once, by SHA-256, nowhere else, with sizes that add up; it
// is judged the same from the registry as from the disk.
func FuzzImage(f *testing.F) {
	layer := func(more string) string {
		return `{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"` + sha([]byte("l")) + `","size":1` + more + `}`
	}
	manifest := func(layers string) []byte {
		return []byte(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"` + sha(nil) + `","size":2},"layers":[` + layers + `]}`)
	}
	config := []byte(`{"architecture":"amd64","os":"linux","config":{"Volumes":{"/b":{},"/a":{}}},"rootfs":{"type":"layers","diff_ids":[]}}`)
	ref := "registry.example.org/apps/hello@" + sha(nil)
	for _, r := range []string{ref, "localhost:5000/a/b-c__d@" + sha(nil), "docker.io/hello@" + sha(nil), "hello@" + sha(nil), strings.Replace(ref, "@", ":1@", 1), ref + "\n", "a/../b@" + sha(nil)} {
		f.Add(r, manifest(layer("")), config)
	}
	for _, l := range []string{"", layer("") + "," + layer(""), layer(`,"urls":["https://example.org/l"]`), layer(`,"URLs":["x"]`), strings.Replace(layer(""), `"size":1`, `"size":9223372036854775807`, 1),
		strings.Replace(layer(""), "sha256:", "sha512:", 1), strings.Replace(layer(""), "tar+gzip", "tar+zstd", 1)} {
		f.Add(ref, manifest(l), config)
	}
	f.Add(ref, []byte(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"`+sha(nil)+`","size":1,"platform":{"os":"linux","architecture":"amd64"}}]}`), config)
	f.Add(ref, []byte(`{"schemaVersion":2,"config":{"mediaType":"application/vnd.docker.container.image.v1+json","digest":"`+sha(nil)+`","size":2},"manifests":[]}`), []byte("null"))
	f.Fuzz(func(t *testing.T, ref string, raw, config []byte) {
		if imageForm.MatchString(ref) {
			repository, digest, _ := strings.Cut(ref, "@")
			rel, err := filepath.Rel("/images/blobs/sha256", blobPath("/images", digest))
			if err != nil || len(rel) != 64 || digestOf(ref) != digest || !blobDigest.MatchString(digest) {
				t.Errorf("%q is of the digest %q and the file %q", ref, digest, rel)
			}
			if strings.Trim(ref, "abcdefghijklmnopqrstuvwxyz0123456789") == "" || strings.ContainsAny(ref, " \t\r\n%$\"'\\") {
				t.Errorf("%q is no reference that a unit can name", ref)
			}
			wrong := ""
			(&enrolled{enrollment: enrollment{Repository: repository}}).checkRepository(func(_, format string, a ...any) { wrong = fmt.Sprintf(format, a...) })
			if r, err := name.NewRepository(repository, name.StrictValidation); err == nil && wrong == "" && !strings.Contains(r.RegistryStr(), "docker.io") && r.Name() != repository {
				t.Errorf("%q leads to %q", repository, r.Name())
			}
		}

		digest := sha(raw)
		m, err := parseManifest(raw, digest, "linux/amd64")
		if again, other := parseManifest(raw, digest, ""); (err == nil) != (other == nil) || err == nil && !reflect.DeepEqual(m, again) {
			t.Errorf("%q is judged %v, and from the disk %v", raw, err, other)
		}
		var coded *codedError
		if err != nil {
			if !errors.As(err, &coded) || coded.Code != "unsupported_manifest" && coded.Code != "not_single_platform" {
				t.Errorf("%q: %v", raw, err)
			}
			return
		}
		sum := int64(len(raw))
		seen := map[string]bool{}
		for _, d := range m.blobs {
			digest := d.Digest.String()
			if seen[digest] || !blobDigest.MatchString(digest) || d.Size < 0 || len(d.URLs) > 0 || sum > math.MaxInt64-d.Size {
				t.Errorf("%q names %+v", raw, d)
			}
			seen[digest], sum = true, sum+d.Size
		}
		if m.size != sum || m.blobs[0].Digest != m.config.Digest || m.config.Size > documentLimit {
			t.Errorf("%q has %d bytes, and is said to have %d of %+v", raw, sum, m.size, m.blobs)
		}
		info, err := m.describe(config)
		if err != nil {
			if !errors.As(err, &coded) || coded.Code != "unsupported_manifest" {
				t.Errorf("%q: %v", config, err)
			}
			return
		}
		if info.Size != sum || info.ConfigID != m.config.Digest.String() || len(info.Blobs) != len(m.blobs)+1 || !slices.IsSorted(info.Volumes) {
			t.Errorf("%q is %+v", raw, info)
		}
		if p := publicPlatform(info.platform); strings.ContainsAny(p, "\n\r\t\"<>") {
			t.Errorf("%q is told as %q", config, p)
		}
	})
}

// systemdLines are the lines of a text as systemd reads them: a carriage return and a zero byte end one too.
func systemdLines(text string) []string {
	return strings.Split(strings.NewReplacer("\r\n", "\n", "\n\r", "\n", "\r", "\n", "\x00", "\n").Replace(strings.TrimSuffix(text, "\n")), "\n")
}

// FuzzRender: each line of a unit is a line of the template, in its order, or one of those that Toad adds,
// in their place, and each means in the unit what it means there. A candidate's has fewer, and no other.
func FuzzRender(f *testing.F) {
	operation, image := strings.Repeat("0", 26), testRepository+"@"+sha(nil)
	templates, err := filepath.Glob("testdata/units/*.template")
	must(f, err)
	for _, path := range templates {
		f.Add(readFile(f, path), "hello", operation, image, int64(3))
	}
	files, err := filepath.Glob("testdata/enrollment/*.txt")
	must(f, err)
	for _, file := range files {
		_, cases := readEnrollmentCases(f, file)
		for i, tt := range cases {
			if i%4 == 0 || strings.HasSuffix(file, "good.txt") {
				f.Add([]byte(tt.files["hello.container"]), "a-b-c", operation, image, int64(math.MaxInt64))
			}
		}
	}
	f.Add([]byte(testTemplate+"[Service]\nRestart=always\rKillMode=none\n"), "hello", operation, image, int64(1))
	f.Add([]byte(testTemplate+"# ]\\\n[Install]\n\\\n"), "hello", operation+"\nKillMode=none", image+"\nUser=root", int64(1))
	tree, err := readQuadletTree(quadlets)
	must(f, err)
	sample := sampleEnrollment(f)
	f.Fuzz(func(t *testing.T, template []byte, service, operation, image string, generation int64) {
		if !serviceID.MatchString(service) || !operationID.MatchString(operation) || !imageForm.MatchString(image) || generation < 1 {
			return // refused before anything is rendered
		}
		e := enrolled{enrollment: sample, file: "hello.json", Template: template}
		p := &problems{}
		e.checkTemplate(p, "hello.container", tree, enrollOptions{})
		if len(p.errs) > 0 {
			return
		}
		id := unitIdentity{DataID: strings.Repeat("a", 26), Service: service, Generation: generation, Operation: operation}
		rendered := id
		rendered.Image = image
		unit := renderUnit(e, rendered)
		before := []string{fmt.Sprintf("# toad data=%s service=%s generation=%d operation=%s", id.DataID, service, generation, operation), "# Written by Toad from the enrolled template; changes are lost.", ""}
		own := []string{"Image=" + image, "Pull=missing", "Label=toad.service=" + service, fmt.Sprintf("Label=toad.generation=%d", generation), "Label=toad.operation=" + operation}
		after := slices.Concat([]string{"", "[Container]", "# Added by Toad."}, own)
		want := slices.Concat(before, strings.Split(strings.TrimSuffix(string(template), "\n"), "\n"), after)
		if got := systemdLines(string(unit)); !slices.Equal(got, want) {
			t.Errorf("the lines of the unit are\n%q\nand not\n%q", got, want)
		}
		if got, ok := parseMarker(unit); !ok || got != id {
			t.Errorf("it is said to be of %+v, not %+v", got, id)
		}

		// The generator's own parser has the same keys with the same values, and Toad's last.
		of, is := parser.NewUnitFile(), parser.NewUnitFile()
		must(t, of.Parse(string(template)))
		must(t, is.Parse(string(unit)))
		for _, line := range own {
			key, value, _ := strings.Cut(line, "=")
			of.Add("Container", key, value)
		}
		sameUnit(t, is, of)

		candidate := candidateForm(unit)
		lines := systemdLines(string(candidate))
		if n := len(lines) - len(after) + 1; n < 3 || !slices.Equal(lines[:3], before) || !slices.Equal(lines[n:], after[1:]) {
			t.Errorf("a candidate's unit lacks lines of Toad's:\n%s", candidate)
		}
		rest := want
		for _, line := range lines {
			i := slices.Index(rest, line)
			if i < 0 {
				t.Fatalf("the line %q of a candidate's unit is no line of the promoted one:\n%s", line, unit)
			}
			rest = rest[i+1:]
		}
		is = parser.NewUnitFile()
		must(t, is.Parse(string(candidate)))
		of.RemoveGroup("Install")
		sameUnit(t, is, of)
		for _, u := range [][]byte{unit, candidate} {
			if err := checkUnitText(u); err != nil {
				t.Errorf("it would not be written: %v\n%s", err, u)
			}
		}
	})
}

// sameUnit sees that two units have the same sections, and in each the same keys with the same values.
func sameUnit(t *testing.T, got, want *parser.UnitFile) {
	t.Helper()
	if !sameSet(got.ListGroups(), want.ListGroups()) {
		t.Errorf("sections %q, want %q", got.ListGroups(), want.ListGroups())
	}
	for _, g := range want.ListGroups() {
		if !sameSet(got.ListKeys(g), want.ListKeys(g)) {
			t.Errorf("[%s] has %q, want %q", g, got.ListKeys(g), want.ListKeys(g))
		}
		for _, k := range want.ListKeys(g) {
			values := want.LookupAllRaw(g, k)
			if !slices.Equal(got.LookupAllRaw(g, k), values) {
				t.Errorf("[%s] %s= is %q, want %q", g, k, got.LookupAllRaw(g, k), values)
			}
			for _, v := range values {
				if strings.ContainsAny(v, "\r\n\x00") {
					t.Errorf("[%s] %s=%q is more than one line to systemd", g, k, v)
				}
			}
		}
	}
}

// FuzzEvents: a log that is verified is the one whose last hash it has, byte for byte. What Toad seals is
// verified, and with any byte changed it is not, or ends elsewhere.
func FuzzEvents(f *testing.F) {
	golden := readFile(f, filepath.Join(goldenDir, "events.jsonl"))
	path := filepath.Join(f.TempDir(), "events.jsonl")
	verify := func(t testing.TB, b []byte) (eventHead, error) {
		must(t, os.WriteFile(path, b, 0o600))
		return verifyEvents(path)
	}
	end, err := verify(f, golden)
	must(f, err)
	lines := bytes.SplitAfter(golden, []byte("\n"))
	f.Add(golden, uint16(0), uint8(1))
	f.Add(bytes.Join(slices.Concat(lines[1:2], lines[:1], lines[2:]), nil), uint16(300), uint8(2))
	f.Add(bytes.Join(lines[1:], nil), uint16(1000), uint8(0x20))
	f.Add(bytes.ReplaceAll(golden, []byte(`","`), []byte(`", "`)), uint16(7), uint8(0x80))
	f.Add(bytes.TrimSuffix(golden, []byte("\n")), uint16(8), uint8(3))
	f.Add([]byte(`{"count":3,"detail":"\ud800 <>&\u2028","at":"2026-11-29T12:00:00.5+01:00"}`+"\n"), uint16(20), uint8(4))
	f.Fuzz(func(t *testing.T, b []byte, at uint16, flip uint8) {
		head, err := verify(t, b)
		var broken *brokenChain
		switch {
		case err != nil:
			if !errors.As(err, &broken) || broken.line < 1 {
				t.Errorf("%q: %v", b, err)
			}
		case head == end && !bytes.Equal(b, golden):
			t.Errorf("this is not the golden log, and is verified to its end:\n%s", b)
		default:
			checkChain(t, b, head)
		}

		// Whatever the lines say, sealed it is a log.
		var sealed []byte
		var sealedEnd eventHead
		for line := range bytes.Lines(b) {
			var e event
			if json.Unmarshal(line, &e) != nil {
				continue
			}
			sealedEnd = e.seal(sealedEnd)
			line, err := json.Marshal(e)
			if err != nil {
				return // no time that can be written
			}
			sealed = append(append(sealed, line...), '\n')
		}
		if head, err := verify(t, sealed); err != nil || head != sealedEnd {
			t.Fatalf("%v: sealed, and not verified:\n%s", err, sealed)
		}
		if flip == 0 || len(sealed) == 0 {
			return
		}
		sealed[int(at)%len(sealed)] ^= flip
		if head, err := verify(t, sealed); err == nil && head == sealedEnd {
			t.Errorf("byte %d is another, and nobody sees it:\n%s", int(at)%len(sealed), sealed)
		}
	})
}

// checkChain reckons the chain of a verified log from its text alone.
func checkChain(t *testing.T, b []byte, end eventHead) {
	t.Helper()
	prev, n := "", int64(0)
	for line := range strings.Lines(string(b)) {
		n++
		text, ok := strings.CutSuffix(line, "\"}\n")
		i := strings.LastIndex(text, `,"hash":"`)
		if !ok || i < 0 || !strings.HasPrefix(line, fmt.Sprintf(`{"cursor":%d,`, n)) || !strings.HasSuffix(text[:i], fmt.Sprintf(`,"prev":%q`, prev)) {
			t.Fatalf("line %d is verified: %q", n, line)
		}
		sum := sha256.Sum256([]byte(prev + text[:i] + `,"hash":""}`))
		if prev = text[i+len(`,"hash":"`):]; prev != hex.EncodeToString(sum[:]) {
			t.Fatalf("line %d is verified, and its hash is another: %q", n, line)
		}
	}
	if end != (eventHead{n, prev}) {
		t.Errorf("the end is said to be %+v, and is line %d with %s", end, n, prev)
	}
}
