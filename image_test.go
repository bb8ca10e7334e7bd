package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	containerregistry "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// fakeRegistry is a registry that can be made to lie.
type fakeRegistry struct {
	*httptest.Server
	t    *testing.T
	host string
	real http.Handler

	mu       sync.Mutex
	requests []string // "manifests sha256:…" and "blobs sha256:…", as asked for by a fetch
	lie      func(w http.ResponseWriter, r *http.Request, kind, digest string) bool
}

func newFakeRegistry(t *testing.T, address string, secure bool) *fakeRegistry {
	f := &fakeRegistry{t: t, real: containerregistry.New(containerregistry.Logger(log.New(io.Discard, "", 0)))}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	f.Server = &httptest.Server{Listener: l, Config: &http.Server{Handler: f, ErrorLog: log.New(io.Discard, "", 0)}}
	if secure {
		f.StartTLS()
	} else {
		f.Start()
	}
	t.Cleanup(f.Close)
	f.host = l.Addr().String()
	return f
}

// registry is how the fake is reached: flagged as plain, or trusted by its certificate.
func (f *fakeRegistry) registry() *registry {
	r := &registry{ownNetworks: func() []netip.Prefix { return nil }}
	if f.TLS == nil {
		r.plainHTTP = []string{f.host}
		return r
	}
	r.caFile = filepath.Join(f.t.TempDir(), "ca.pem")
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.Certificate().Raw})
	if err := os.WriteFile(r.caFile, block, 0o600); err != nil {
		f.t.Fatal(err)
	}
	return r
}

func (f *fakeRegistry) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(r.URL.Path, "/")
	kind, digest := "", ""
	if len(parts) > 4 {
		kind, digest = parts[len(parts)-2], parts[len(parts)-1]
	}
	f.mu.Lock()
	if kind != "" {
		f.requests = append(f.requests, kind+" "+digest)
	}
	lie := f.lie
	f.mu.Unlock()
	if lie != nil && lie(w, r, kind, digest) {
		return
	}
	f.real.ServeHTTP(w, r)
}

func (f *fakeRegistry) lies(lie func(w http.ResponseWriter, r *http.Request, kind, digest string) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lie = lie
}

// asked returns what was asked for since the last time.
func (f *fakeRegistry) asked() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	asked := f.requests
	f.requests = nil
	return asked
}

// RoundTrip lets the test push without the network, and without being lied to.
func (f *fakeRegistry) RoundTrip(r *http.Request) (*http.Response, error) {
	served := r.Clone(r.Context())
	if served.Body == nil {
		served.Body = http.NoBody
	}
	w := httptest.NewRecorder()
	f.real.ServeHTTP(w, served)
	resp := w.Result()
	resp.Request = r
	return resp, nil
}

// push pushes an image, or an index, and returns its reference by digest.
func (f *fakeRegistry) push(repo string, what remote.Taggable) string {
	f.t.Helper()
	tag, err := name.NewTag(f.host+"/"+repo+":x", name.Insecure)
	if err != nil {
		f.t.Fatal(err)
	}
	raw, err := what.RawManifest()
	if err != nil {
		f.t.Fatal(err)
	}
	switch what := what.(type) {
	case v1.Image:
		err = remote.Write(tag, what, remote.WithTransport(f))
	case v1.ImageIndex:
		err = remote.WriteIndex(tag, what, remote.WithTransport(f))
	default:
		err = remote.Put(tag, what, remote.WithTransport(f))
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return f.host + "/" + repo + "@" + digestBytes(raw)
}

// rawManifest is pushed as it stands.
type rawManifest struct {
	data      []byte
	mediaType types.MediaType
}

func (m rawManifest) RawManifest() ([]byte, error)        { return m.data, nil }
func (m rawManifest) MediaType() (types.MediaType, error) { return m.mediaType, nil }

// testImage makes an OCI image of so many random layers.
func testImage(t *testing.T, platform string, layers int64) v1.Image {
	t.Helper()
	image, err := random.Image(5000, layers)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, _ = strings.Cut(platform, "/")
	config.Config.Volumes = map[string]struct{}{"/data": {}, "/cache": {}}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		t.Fatal(err)
	}
	return mutate.ConfigMediaType(mutate.MediaType(image, types.OCIManifestSchema1), types.OCIConfigJSON)
}

// blobsOf gives manifest, config and layers of an image by digest.
func blobsOf(t *testing.T, image v1.Image) (manifest, config string, layers []string) {
	t.Helper()
	m, err := image.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range m.Layers {
		layers = append(layers, l.Digest.String())
	}
	raw, err := image.RawManifest()
	if err != nil {
		t.Fatal(err)
	}
	return digestBytes(raw), m.Config.Digest.String(), layers
}

const amd64 = "linux/amd64"

func fetchIt(t *testing.T, r *registry, dir, ref string) (imageInfo, error) {
	return r.fetch(t.Context(), dir, ref, 1<<30, amd64, 0)
}

func codeOf(err error) string {
	if c, ok := errors.AsType[*codedError](err); ok {
		return c.Code
	}
	return ""
}

// stored lists the names in the layout's blob directory.
func stored(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "blobs", "sha256"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func hexes(digests ...string) []string {
	var all []string
	for _, d := range digests {
		all = append(all, hexOf(d))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func TestFetch(t *testing.T) {
	for _, kind := range []types.MediaType{types.OCIManifestSchema1, types.DockerManifestSchema2} {
		for _, secure := range []bool{true, false} {
			f := newFakeRegistry(t, "127.0.0.1:0", secure)
			image := testImage(t, amd64, 3)
			if kind == types.DockerManifestSchema2 {
				image = mutate.ConfigMediaType(mutate.MediaType(image, kind), types.DockerConfigJSON)
			}
			manifest, config, layers := blobsOf(t, image)
			ref := f.push("apps/hello", image)
			dir := filepath.Join(t.TempDir(), "a", "images")
			r := f.registry()
			info, err := fetchIt(t, r, dir, ref)
			if err != nil {
				t.Fatal(err)
			}
			want := imageInfo{ConfigID: config, Size: info.Size, Volumes: []string{"/cache", "/data"},
				Blobs: append([]string{manifest, config}, layers...)}
			if !reflect.DeepEqual(info, want) {
				t.Errorf("got %+v, want %+v", info, want)
			}
			size := int64(0)
			for _, b := range info.Blobs {
				st, err := os.Stat(blobPath(dir, b))
				if err != nil {
					t.Fatal(err)
				}
				size += st.Size()
			}
			if size != info.Size {
				t.Errorf("size %d, want %d", info.Size, size)
			}
			asked := []string{"manifests " + manifest, "blobs " + config}
			for _, l := range layers {
				asked = append(asked, "blobs "+l)
			}
			if got := f.asked(); !slices.Equal(got, asked) {
				t.Errorf("asked for %v, want %v", got, asked)
			}

			// The second time it needs no registry, whatever the limit and the room are by now.
			f.Close()
			again, err := r.fetch(t.Context(), dir, ref, 1, amd64, 1<<60)
			if err != nil || !reflect.DeepEqual(again, info) {
				t.Errorf("again without a registry: %+v, %v", again, err)
			}
			if checked, err := checkLayout(dir, manifest); err != nil || !reflect.DeepEqual(checked, info) {
				t.Errorf("checked: %+v, %v", checked, err)
			}
			checkWithLayoutPackage(t, dir, ref)
		}
	}
}

// checkWithLayoutPackage reads a layout with other code than that which wrote it.
func checkWithLayoutPackage(t *testing.T, dir string, refs ...string) {
	t.Helper()
	path, err := layout.FromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	index, err := path.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	m, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, d := range m.Manifests {
		names = append(names, d.Annotations[refName])
		image, err := index.Image(d.Digest)
		if err != nil {
			t.Fatal(err)
		}
		if err := validate.Image(image); err != nil {
			t.Error(err)
		}
	}
	slices.Sort(names)
	slices.Sort(refs)
	if !slices.Equal(names, refs) {
		t.Errorf("index names %v, want %v", names, refs)
	}
}

// An inspection finds what a fetch would, from manifest and config alone, and stores nothing.
func TestInspect(t *testing.T) {
	f := newFakeRegistry(t, "127.0.0.1:0", true)
	image := testImage(t, amd64, 3)
	manifest, config, _ := blobsOf(t, image)
	ref := f.push("apps/hello", image)
	dir := filepath.Join(t.TempDir(), "images")
	r := f.registry()
	if err := r.inspect(t.Context(), dir, ref, 1<<30, amd64); err != nil {
		t.Fatal(err)
	}
	if got, want := f.asked(), []string{"manifests " + manifest, "blobs " + config}; !slices.Equal(got, want) {
		t.Errorf("asked for %v, want %v", got, want)
	}
	for code, err := range map[string]error{
		"image_too_large": r.inspect(t.Context(), dir, ref, 1, amd64),
		"wrong_platform":  r.inspect(t.Context(), dir, ref, 1<<30, "linux/arm64"),
		"fetch_failed":    r.inspect(t.Context(), dir, strings.Replace(ref, manifest, "sha256:"+strings.Repeat("0", 64), 1), 1<<30, amd64),
	} {
		if got := codeOf(err); got != code {
			t.Errorf("%v, want %s", err, code)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("something was stored: %v", err)
	}
	if _, err := fetchIt(t, r, dir, ref); err != nil {
		t.Fatal(err)
	}
	f.Close() // what is there needs no registry
	if err := r.inspect(t.Context(), dir, ref, 1, amd64); err != nil {
		t.Error(err)
	}
}

func TestFetchRefuses(t *testing.T) {
	f := newFakeRegistry(t, "127.0.0.1:0", false)
	image := testImage(t, amd64, 2)
	arm := testImage(t, "linux/arm64", 1)
	strange := testImage(t, "linux/<script>", 1)
	manifest, config, layers := blobsOf(t, image)
	armManifest, armConfig, _ := blobsOf(t, arm)
	strangeManifest, strangeConfig, _ := blobsOf(t, strange)
	platform := func(arch string) v1.Descriptor {
		return v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}
	}
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: arm, Descriptor: platform("arm64")}, mutate.IndexAddendum{Add: image, Descriptor: platform("amd64")})
	armOnly := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: arm, Descriptor: platform("arm64")})
	schema1 := rawManifest{[]byte(`{"schemaVersion":1,"name":"x","fsLayers":[]}`), types.DockerManifestSchema1}
	huge := rawManifest{fmt.Appendf(nil, `{"schemaVersion":2,"x":%q}`, strings.Repeat("x", documentLimit)), types.OCIManifestSchema1}
	ref := f.push("apps/hello", image)
	f.push("apps/hello", arm)
	only := func(kind, digest string) []string { return []string{kind + " " + digest} }

	tests := []struct {
		name    string
		ref     string
		limit   byteSize
		reserve int64
		code    string
		summary string
		asked   []string
	}{
		{"index", f.push("apps/hello", index), 1 << 30, 0, "not_single_platform", "its image for linux/amd64: " + manifest, nil},
		{"index without us", f.push("apps/hello", armOnly), 1 << 30, 0, "not_single_platform", "its image for linux/amd64: not in it", nil},
		{"another platform", f.host + "/apps/hello@" + armManifest, 1 << 30, 0, "wrong_platform", "for linux/arm64, and this host is linux/amd64",
			append(only("manifests", armManifest), only("blobs", armConfig)...)},
		{"a platform not to be repeated", f.push("apps/hello", strange), 1 << 30, 0, "wrong_platform", "for an unknown platform, and",
			append(only("manifests", strangeManifest), only("blobs", strangeConfig)...)},
		{"schema 1", f.push("apps/hello", schema1), 1 << 30, 0, "unsupported_manifest", "schema version", nil},
		{"huge manifest", f.push("apps/hello", huge), 1 << 30, 0, "unsupported_manifest", "larger than 4 MiB", nil},
		{"above the limit", ref, 100, 0, "image_too_large", "the enrolled limit is 100", only("manifests", manifest)},
		{"no room", ref, 1 << 30, 1 << 60, "image_too_large", "not twice that free", only("manifests", manifest)},
		{"unknown", f.host + "/apps/hello@" + config, 1 << 30, 0, "fetch_failed", "does not have it", only("manifests", config)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f.t = t
			f.asked()
			dir := t.TempDir()
			_, err := f.registry().fetch(t.Context(), dir, tt.ref, tt.limit, amd64, tt.reserve)
			if c, ok := errors.AsType[*codedError](err); !ok || c.Code != tt.code || !strings.Contains(c.Summary, tt.summary) {
				t.Errorf("got %v, want %s with %q", err, tt.code, tt.summary)
			}
			if got := f.asked(); tt.asked != nil && !slices.Equal(got, tt.asked) || len(got) > 2 {
				t.Errorf("asked for %v", got)
			}
			if slices.Contains(stored(t, dir), hexOf(digestOf(tt.ref))) {
				t.Error("the manifest was kept")
			}
		})
	}
	if len(layers) == 0 {
		t.Fatal("no layers")
	}
	for _, ref := range []string{"", "registry.example.org/a:latest", "registry.example.org/a@sha512:" + strings.Repeat("0", 128), "a@sha256:../../x"} {
		if _, err := fetchIt(t, &registry{}, t.TempDir(), ref); err == nil {
			t.Errorf("%q was taken", ref)
		}
	}
}

func TestParseManifest(t *testing.T) {
	const (
		config = `{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:4b2c8e629541459aec3c1b7c7cfa4450aa2654e3c7692679653f8ae7b5f8f235","size":7}`
		layer  = `{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"sha256:62b60d952639925eb618c04367f4529d7b55062fc9e68df7d4cc413638b44a5f","size":9}`
	)
	change := func(s, old, new string) string { return strings.Replace(s, old, new, 1) }
	tests := []struct {
		name, manifest, code, summary string
	}{
		{"whole", `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":` + config + `,"layers":[` + layer + `]}`, "", ""},
		{"no media type", `{"schemaVersion":2,"config":` + config + `,"layers":[` + layer + `]}`, "", ""},
		{"no layers", `{"schemaVersion":2,"config":` + config + `,"layers":[]}`, "", ""},
		{"a layer twice", `{"schemaVersion":2,"config":` + config + `,"layers":[` + layer + `,` + layer + `]}`, "", ""},
		{"a layer with two sizes", `{"schemaVersion":2,"config":` + config + `,"layers":[` + layer + `,` + change(layer, `:9}`, `:8}`) + `]}`, "unsupported_manifest", "two sizes"},
		{"urls", `{"schemaVersion":2,"config":` + config + `,"layers":[` + change(layer, `:9}`, `:9,"urls":["https://registry.example.org/x"]}`) + `]}`, "unsupported_manifest", "URL"},
		{"urls of the config", `{"schemaVersion":2,"config":` + change(config, `:7}`, `:7,"urls":["file:///etc/passwd"]}`) + `,"layers":[]}`, "unsupported_manifest", "URL"},
		{"foreign layer", `{"schemaVersion":2,"config":` + config + `,"layers":[` + change(layer, `layer.v1`, `layer.nondistributable.v1`) + `]}`, "unsupported_manifest", "layer"},
		{"encrypted layer", `{"schemaVersion":2,"config":` + config + `,"layers":[` + change(layer, `gzip`, `gzip+encrypted`) + `]}`, "unsupported_manifest", "layer"},
		{"sha512", `{"schemaVersion":2,"config":` + config + `,"layers":[` + change(layer, `sha256:`, `sha512:62b60d952639925eb618c04367f4529d7b55062fc9e68df7d4cc413638b44a5f`) + `]}`, "unsupported_manifest", "sha256"},
		{"a path for a digest", `{"schemaVersion":2,"config":` + config + `,"layers":[` + change(layer, `sha256:62b6`, `sha256:../../62b6`) + `]}`, "unsupported_manifest", "read"},
		{"negative size", `{"schemaVersion":2,"config":` + config + `,"layers":[` + change(layer, `:9}`, `:-9}`) + `]}`, "unsupported_manifest", "size"},
		{"sizes that overflow", `{"schemaVersion":2,"config":` + config + `,"layers":[` + change(layer, `:9}`, `:9223372036854775807}`) + `]}`, "unsupported_manifest", "size"},
		{"huge config", `{"schemaVersion":2,"config":` + change(config, `:7}`, `:7000000}`) + `,"layers":[]}`, "unsupported_manifest", "config"},
		{"artifact", `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":` + change(config, `application/vnd.oci.image.config.v1+json`, `application/vnd.oci.empty.v1+json`) + `,"layers":[]}`, "unsupported_manifest", "artifact"},
		{"another type", `{"schemaVersion":2,"mediaType":"application/vnd.oci.artifact.manifest.v1+json"}`, "unsupported_manifest", "media type"},
		{"nothing", `{"schemaVersion":2}`, "unsupported_manifest", "media type"},
		{"both", `{"schemaVersion":2,"manifests":[],"config":` + config + `,"layers":[]}`, "unsupported_manifest", "in one"},
		{"no JSON", `<html>`, "unsupported_manifest", "read"},
		{"index without media type", `{"schemaVersion":2,"manifests":[]}`, "not_single_platform", "not in it"},
	}
	for _, tt := range tests {
		m, err := parseManifest([]byte(tt.manifest), "sha256:x", amd64)
		if tt.code == "" {
			if err != nil || len(m.blobs) > 2 {
				t.Errorf("%s: %+v, %v", tt.name, m, err)
			}
		} else if c, ok := errors.AsType[*codedError](err); !ok || c.Code != tt.code || !strings.Contains(c.Summary, tt.summary) {
			t.Errorf("%s: got %v, want %s with %q", tt.name, err, tt.code, tt.summary)
		}
	}
}

// What a registry sends under a digest is never believed, and the registry may go away at any moment
// (CASES S5): nothing of it shows under a digest, and what was whole is not asked for again.
func TestFetchFromLiar(t *testing.T) {
	f := newFakeRegistry(t, "127.0.0.1:0", false)
	image := testImage(t, amd64, 2)
	manifest, config, layers := blobsOf(t, image)
	ref := f.push("apps/hello", image)
	original := func(r *http.Request) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		f.real.ServeHTTP(w, r)
		return w
	}
	send := func(change func([]byte) []byte, chunked bool) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, r *http.Request) {
			o := original(r)
			w.Header().Set("Content-Type", o.Header().Get("Content-Type"))
			if chunked {
				w.(http.Flusher).Flush() // no length
			}
			w.Write(change(o.Body.Bytes()))
		}
	}
	flip := func(b []byte) []byte { b[len(b)/2] ^= 1; return b }
	tests := []struct {
		name, at, code string
		do             func(http.ResponseWriter, *http.Request)
	}{
		{"other manifest", manifest, "digest_mismatch", send(flip, false)},
		{"other config", config, "digest_mismatch", send(flip, false)},
		{"other layer", layers[1], "digest_mismatch", send(flip, false)},
		{"longer layer", layers[1], "digest_mismatch", send(func(b []byte) []byte { return append(b, 0) }, false)},
		{"longer layer without length", layers[1], "digest_mismatch", send(func(b []byte) []byte { return append(b, make([]byte, 1<<20)...) }, true)},
		{"shorter layer without length", layers[1], "digest_mismatch", send(func(b []byte) []byte { return b[1:] }, true)},
		{"gone before the config", config, "fetch_failed", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }},
		{"gone before a layer", layers[1], "fetch_failed", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }},
		{"gone within the manifest", manifest, "fetch_failed", func(w http.ResponseWriter, r *http.Request) {
			w.Write(original(r).Body.Bytes()[:100])
			panic(http.ErrAbortHandler)
		}},
		{"gone within a layer", layers[1], "fetch_failed", func(w http.ResponseWriter, r *http.Request) {
			w.Write(original(r).Body.Bytes()[:100])
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}},
		{"sick", layers[1], "fetch_failed", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(503) }},
		{"an empty answer", layers[1], "digest_mismatch", func(w http.ResponseWriter, r *http.Request) {}},
		{"no content", manifest, "fetch_failed", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(204) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f.t = t
			dir := t.TempDir()
			f.lies(func(w http.ResponseWriter, r *http.Request, _, digest string) bool {
				if digest == tt.at {
					tt.do(w, r)
				}
				return digest == tt.at
			})
			_, err := fetchIt(t, f.registry(), dir, ref)
			if codeOf(err) != tt.code {
				t.Errorf("got %v, want %s", err, tt.code)
			}
			have := stored(t, dir)
			for _, name := range have {
				if data, _ := os.ReadFile(filepath.Join(dir, "blobs", "sha256", name)); digestBytes(data) != "sha256:"+name {
					t.Errorf("%s is there and wrong", name)
				}
			}
			if slices.Contains(have, hexOf(tt.at)) || slices.Contains(have, hexOf(manifest)) {
				t.Errorf("stored %v", have)
			}
			f.lies(nil)
			f.asked()
			if _, err := fetchIt(t, f.registry(), dir, ref); err != nil {
				t.Error(err)
			}
			for _, a := range f.asked() {
				if slices.Contains(have, hexOf(strings.TrimPrefix(a, "blobs "))) {
					t.Errorf("asked again for %s", a)
				}
			}
		})
	}
	t.Run("a blip is bridged", func(t *testing.T) {
		f.t = t
		var once sync.Once
		f.lies(func(w http.ResponseWriter, _ *http.Request, _, digest string) (lied bool) {
			if digest == layers[0] {
				once.Do(func() { lied = true; w.WriteHeader(503) })
			}
			return lied
		})
		if _, err := fetchIt(t, f.registry(), t.TempDir(), ref); err != nil {
			t.Error(err)
		}
	})
	t.Run("off", func(t *testing.T) {
		f.t = t
		f.Close()
		dir := t.TempDir()
		if _, err := fetchIt(t, f.registry(), dir, ref); codeOf(err) != "fetch_failed" || len(stored(t, dir)) != 0 {
			t.Errorf("got %v", err)
		}
	})
}

// A registry that accepts and says nothing more holds a fetch no longer than the deadline, and not
// even that long for the header of an answer.
func TestFetchSlow(t *testing.T) {
	f := newFakeRegistry(t, "127.0.0.1:0", false)
	image := testImage(t, amd64, 2)
	_, config, layers := blobsOf(t, image)
	ref := f.push("apps/hello", image)
	stuck := make(chan struct{}, 100)
	over := make(chan struct{})
	defer close(over)
	at := func(where string) {
		f.lies(func(w http.ResponseWriter, _ *http.Request, _, digest string) bool {
			if digest != where {
				return false
			}
			if digest == layers[1] {
				w.Write([]byte("begun"))
				w.(http.Flusher).Flush()
			}
			stuck <- struct{}{}
			<-over
			return true
		})
	}
	for _, where := range []string{config, layers[1]} {
		at(where)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		_, err := f.registry().fetch(ctx, t.TempDir(), ref, 1<<30, amd64, 0)
		cancel()
		if c, ok := errors.AsType[*codedError](err); !ok || c.Code != "fetch_failed" || !strings.Contains(c.Summary, "deadline") || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("past the deadline: %v", err)
		}

		cause := errors.New("shutting down")
		ctx, stop := context.WithCancelCause(t.Context())
		go func() {
			<-stuck
			stop(cause)
		}()
		if _, err := f.registry().fetch(ctx, t.TempDir(), ref, 1<<30, amd64, 0); !errors.Is(err, cause) || codeOf(err) != "" {
			t.Errorf("canceled: %v", err)
		}
	}
	at(config)
	r := f.registry()
	r.stall = 20 * time.Millisecond
	_, err := fetchIt(t, r, t.TempDir(), ref)
	if c, ok := errors.AsType[*codedError](err); !ok || c.Code != "fetch_failed" || !strings.Contains(c.Summary, "in time") {
		t.Errorf("no header: %v", err)
	}
}

func TestFetchAuth(t *testing.T) {
	f := newFakeRegistry(t, "127.0.0.1:0", true)
	image := testImage(t, amd64, 1)
	ref := f.push("apps/hello", image)
	entry := func(user, password string) string {
		return `{"auth":"` + base64.StdEncoding.EncodeToString([]byte(user+":"+password)) + `"}`
	}
	right := func(r *http.Request) bool {
		user, password, _ := r.BasicAuth()
		return user == "toad" && password == "pond-secret"
	}
	basic := func(w http.ResponseWriter, r *http.Request, _, _ string) bool {
		if right(r) {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		w.WriteHeader(401)
		return true
	}
	token := func(w http.ResponseWriter, r *http.Request, _, _ string) bool {
		switch {
		case r.URL.Path == "/token":
			if scope := r.URL.Query().Get("scope"); scope != "repository:apps/hello:pull" {
				t.Errorf("scope %q", scope)
			}
			if !right(r) {
				w.WriteHeader(401)
			} else {
				io.WriteString(w, `{"token":"token-secret"}`)
			}
			return true
		case r.Header.Get("Authorization") == "Bearer token-secret":
			return false
		}
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="https://%s/token",service="x"`, f.host))
		w.WriteHeader(401)
		return true
	}
	oddToken := func(w http.ResponseWriter, r *http.Request, _, _ string) bool {
		if r.URL.Path == "/token" {
			io.WriteString(w, `{"refresh_token":"token-secret"}`)
			return true
		}
		return token(w, r, "", "")
	}
	tests := []struct {
		name, file, reason string
		lie                func(http.ResponseWriter, *http.Request, string, string) bool
	}{
		{"basic, host", `{"auths":{"` + f.host + `":` + entry("toad", "pond-secret") + `}}`, "", basic},
		{"basic, repository", `{"auths":{"` + f.host + `/apps/hello":` + entry("toad", "pond-secret") + `}}`, "", basic},
		{"basic, path before host", `{"auths":{"` + f.host + `":` + entry("x", "y") + `,"` + f.host + `/apps":` + entry("toad", "pond-secret") + `}}`, "", basic},
		{"another's entry is broken", `{"auths":{"registry.example.org":{"auth":"~"},"` + f.host + `":` + entry("toad", "pond-secret") + `}}`, "", basic},
		{"token, host", `{"auths":{"` + f.host + `":` + entry("toad", "pond-secret") + `}}`, "", token},
		{"token, repository", `{"auths":{"` + f.host + `/apps/hello":` + entry("toad", "pond-secret") + `}}`, "", token},
		{"wrong", `{"auths":{"` + f.host + `":` + entry("toad", "wrong-secret") + `}}`, "denied access", basic},
		{"token, wrong", `{"auths":{"` + f.host + `":` + entry("toad", "wrong-secret") + `}}`, "denied access", token},
		{"token, odd answer", `{"auths":{"` + f.host + `":` + entry("toad", "pond-secret") + `}}`, "not acceptable", oddToken},
		{"another host", `{"auths":{"registry.example.org":` + entry("toad", "pond-secret") + `}}`, "denied access", basic},
		{"empty", ``, "denied access", basic},
		{"missing", "-", "denied access", token},
		{"no JSON", `{"auths":{"pond-secret`, "settings", basic},
		{"broken", `{"auths":{"` + f.host + `":{"auth":"pond-secret"}}}`, "settings", basic},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f.t = t
			f.lies(tt.lie)
			r := f.registry()
			r.authFile = filepath.Join(t.TempDir(), "auth.json")
			if tt.file != "-" {
				if err := os.WriteFile(r.authFile, []byte(tt.file), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			_, err := fetchIt(t, r, t.TempDir(), ref)
			if tt.reason == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if c, ok := errors.AsType[*codedError](err); !ok || c.Code != "fetch_failed" || !strings.Contains(c.Summary, tt.reason) {
				t.Errorf("got %v, want %q", err, tt.reason)
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("a secret in %v", err)
			}
		})
	}
}

func TestFetchTrust(t *testing.T) {
	f := newFakeRegistry(t, "127.0.0.1:0", true)
	ref := f.push("apps/hello", testImage(t, amd64, 1))
	for want, change := range map[string]func(*registry){
		"not trusted": func(r *registry) { r.caFile = filepath.Join(t.TempDir(), "none") },
		"settings":    func(r *registry) { r.caFile = "/dev/null/x" },
	} {
		r := f.registry()
		change(r)
		_, err := fetchIt(t, r, t.TempDir(), ref)
		if c, ok := errors.AsType[*codedError](err); !ok || !strings.Contains(c.Summary, want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	// A host in plain HTTP that is not flagged is not spoken to, loopback or not.
	plain := newFakeRegistry(t, "127.0.0.1:0", false)
	ref = plain.push("apps/hello", testImage(t, amd64, 1))
	_, err := fetchIt(t, &registry{plainHTTP: []string{"127.0.0.1"}}, t.TempDir(), ref)
	if c, ok := errors.AsType[*codedError](err); !ok || !strings.Contains(c.Summary, "not allowed") || len(plain.asked()) != 0 {
		t.Errorf("unflagged: %v", err)
	}
}

// Where the registry sends a fetch to is bounded: TLS or a flagged host, and none of Toad's networks.
func TestFetchLedAway(t *testing.T) {
	own := func(prefixes ...string) func() []netip.Prefix {
		var all []netip.Prefix
		for _, p := range prefixes {
			all = append(all, netip.MustParsePrefix(p))
		}
		return func() []netip.Prefix { return all }
	}
	tests := []struct {
		name          string
		secure, plain bool // the other host: does it speak TLS, is it flagged
		address       string
		own           func() []netip.Prefix
		reached       bool
	}{
		{"https", true, false, "127.0.0.1:0", own(), true},
		{"plain HTTP", false, false, "127.0.0.1:0", own(), false},
		{"plain HTTP, flagged", false, true, "127.0.0.1:0", own(), true},
		{"an own network", true, false, "127.0.0.1:0", own("127.0.0.1/32"), false},
		{"an own network, flagged", false, true, "127.0.0.1:0", own("127.0.0.1/32"), false},
		{"the registry's network", true, false, "127.0.0.1:0", own("127.0.0.0/30"), true},
		{"the registry's network within another", true, false, "127.0.0.1:0", own("127.0.0.0/30", "127.0.0.1/32"), false},
		{"this host", true, false, "[::1]:0", own(), false}, // the registry is in 127.0.0.0/8 only
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFakeRegistry(t, "127.0.0.2:0", false)
			image := testImage(t, amd64, 1)
			_, _, layers := blobsOf(t, image)
			ref := f.push("apps/hello", image)
			other := newFakeRegistry(t, tt.address, tt.secure)
			other.push("apps/hello", image)
			connected := 0
			other.lies(func(_ http.ResponseWriter, r *http.Request, _, _ string) bool {
				connected++
				if r.Header.Get("Authorization") != "" {
					t.Error("credentials were sent to where the registry led")
				}
				return false
			})
			f.lies(func(w http.ResponseWriter, r *http.Request, _, digest string) bool {
				if _, _, ok := r.BasicAuth(); !ok {
					w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
					w.WriteHeader(401)
					return true
				}
				if digest == layers[0] {
					http.Redirect(w, r, other.URL+r.URL.Path+"?signature=secret", http.StatusTemporaryRedirect)
				}
				return digest == layers[0]
			})
			r := other.registry()
			if !tt.plain {
				r.plainHTTP = nil
			}
			r.plainHTTP = append(r.plainHTTP, f.host)
			r.ownNetworks = tt.own
			r.authFile = filepath.Join(t.TempDir(), "auth.json")
			if err := os.WriteFile(r.authFile, []byte(`{"auths":{"`+f.host+`":{"auth":"eDp5"}}}`), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := fetchIt(t, r, t.TempDir(), ref)
			if tt.reached && (err != nil || connected != 1) {
				t.Errorf("%d requests, %v", connected, err)
			}
			if !tt.reached && (codeOf(err) != "fetch_failed" || !errors.Is(err, errRefused) || connected != 0) {
				t.Errorf("%d requests, %v", connected, err)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("a secret in %v", err)
			}
		})
	}

	// The same for a token realm. localhost is in an own network here, and the registry is not.
	f := newFakeRegistry(t, "127.0.0.2:0", false)
	ref := f.push("apps/hello", testImage(t, amd64, 1))
	realm := newFakeRegistry(t, "127.0.0.1:0", false)
	realm.lies(func(w http.ResponseWriter, _ *http.Request, _, _ string) bool {
		t.Error("the realm was asked")
		return false
	})
	_, port, _ := net.SplitHostPort(realm.host)
	f.lies(func(w http.ResponseWriter, _ *http.Request, _, _ string) bool {
		w.Header().Set("WWW-Authenticate", `Bearer realm="http://localhost:`+port+`/token",service="x"`)
		w.WriteHeader(401)
		return true
	})
	for _, flagged := range []bool{true, false} {
		r := f.registry()
		if flagged {
			r.plainHTTP = append(r.plainHTTP, "localhost:"+port)
			r.ownNetworks = own("127.0.0.1/32")
		}
		if _, err := fetchIt(t, r, t.TempDir(), ref); !errors.Is(err, errRefused) || codeOf(err) != "fetch_failed" {
			t.Errorf("realm, flagged %v: %v", flagged, err)
		}
	}
}

func TestFetchByProxy(t *testing.T) {
	f := newFakeRegistry(t, "127.0.0.1:0", false)
	image := testImage(t, amd64, 1)
	const host = "registry.example.org:5000"
	ref := host + "/apps/hello@" + digestOf(f.push("apps/hello", image))
	var mu sync.Mutex
	asked := make(map[string]bool)
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		asked[r.Method+" "+r.Host] = true
		mu.Unlock()
		if r.Method == http.MethodConnect {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		f.real.ServeHTTP(w, r)
	}))
	defer proxy.Close()
	u, err := url.Parse(proxy.URL)
	if err != nil {
		t.Fatal(err)
	}
	r := &registry{plainHTTP: []string{host}, proxy: http.ProxyURL(u),
		ownNetworks: func() []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")} }}
	if _, err := fetchIt(t, r, t.TempDir(), ref); err != nil {
		t.Error(err)
	}
	if !asked["GET "+host] || len(f.asked()) != 0 {
		t.Errorf("asked the proxy for %v", asked)
	}
}

func TestFetchRepairs(t *testing.T) {
	f := newFakeRegistry(t, "127.0.0.1:0", false)
	image := testImage(t, amd64, 3)
	manifest, config, layers := blobsOf(t, image)
	ref := f.push("apps/hello", image)
	dir := t.TempDir()
	if _, err := fetchIt(t, f.registry(), dir, ref); err != nil {
		t.Fatal(err)
	}
	flip := func(path string) error {
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		data[len(data)/2] ^= 1
		return os.WriteFile(path, data, 0o600)
	}
	tests := []struct {
		name, digest string
		harm         func(path string) error
		want         error
	}{
		{"a flipped bit in a layer", layers[1], flip, errDamaged},
		{"a flipped bit in the config", config, flip, errDamaged},
		{"a flipped bit in the manifest", manifest, flip, errDamaged},
		{"a short layer", layers[0], func(path string) error { return os.Truncate(path, 10) }, errDamaged},
		{"an empty layer", layers[0], func(path string) error { return os.Truncate(path, 0) }, errDamaged},
		{"a long layer", layers[0], func(path string) error { return os.Truncate(path, 1<<20) }, errDamaged},
		{"no layer", layers[2], os.Remove, errNotFound},
		{"no config", config, os.Remove, errNotFound},
		{"no manifest", manifest, os.Remove, errNotFound},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f.t = t
			if err := tt.harm(blobPath(dir, tt.digest)); err != nil {
				t.Fatal(err)
			}
			if _, err := checkLayout(dir, manifest); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
			if err := writeArchive(io.Discard, dir, ref, manifest); !errors.Is(err, tt.want) {
				t.Errorf("archive: got %v, want %v", err, tt.want)
			}
			f.asked()
			if _, err := fetchIt(t, f.registry(), dir, ref); err != nil {
				t.Fatal(err)
			}
			kind := "blobs "
			if tt.digest == manifest {
				kind = "manifests "
			}
			if got := f.asked(); !slices.Equal(got, []string{kind + tt.digest}) {
				t.Errorf("asked for %v", got)
			}
			if _, err := checkLayout(dir, manifest); err != nil {
				t.Error(err)
			}
		})
	}
	if _, err := checkLayout(filepath.Join(dir, "none"), manifest); !errors.Is(err, errNotFound) {
		t.Errorf("no layout: %v", err)
	}
}

func TestWriteArchive(t *testing.T) {
	f := newFakeRegistry(t, "127.0.0.1:0", false)
	dir := t.TempDir()
	image := testImage(t, amd64, 2)
	ref := f.push("apps/hello", image)
	for _, r := range []string{ref, f.push("apps/other", testImage(t, amd64, 2))} {
		if _, err := fetchIt(t, f.registry(), dir, r); err != nil {
			t.Fatal(err)
		}
	}
	var archive bytes.Buffer
	if err := writeArchive(&archive, dir, ref, digestOf(ref)); err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	if err := os.MkdirAll(filepath.Join(out, "blobs", "sha256"), 0o700); err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(&archive); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
		if err := os.WriteFile(filepath.Join(out, h.Name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	manifest, config, layers := blobsOf(t, image)
	want := []string{"oci-layout", "index.json"}
	for _, d := range append([]string{manifest, config}, layers...) {
		want = append(want, "blobs/sha256/"+hexOf(d))
	}
	if !slices.Equal(names, want) {
		t.Errorf("archived %v, want %v", names, want)
	}
	checkWithLayoutPackage(t, out, ref)

	broken := errors.New("the reader went away")
	r, w := io.Pipe()
	r.CloseWithError(broken)
	if err := writeArchive(w, dir, ref, digestOf(ref)); !errors.Is(err, broken) || errors.Is(err, errStorage) {
		t.Errorf("got %v", err)
	}
}

func TestPruneLayout(t *testing.T) {
	f := newFakeRegistry(t, "127.0.0.1:0", false)
	dir := t.TempDir()
	base := testImage(t, amd64, 2)
	more, err := random.Layer(3000, types.OCILayer)
	if err != nil {
		t.Fatal(err)
	}
	grown, err := mutate.AppendLayers(base, more) // shares two layers
	if err != nil {
		t.Fatal(err)
	}
	refs := make(map[string]string)
	blobs := make(map[string][]string)
	for _, image := range []v1.Image{base, grown, testImage(t, amd64, 1)} {
		ref := f.push("apps/hello", image)
		info, err := fetchIt(t, f.registry(), dir, ref)
		if err != nil {
			t.Fatal(err)
		}
		refs[digestOf(ref)] = ref
		blobs[digestOf(ref)] = info.Blobs
	}
	checkWithLayoutPackage(t, dir, slices.Collect(maps.Values(refs))...)
	baseDigest, _, _ := blobsOf(t, base)
	grownDigest, grownConfig, _ := blobsOf(t, grown)
	for _, name := range []string{"blobs/sha256/.aaaa123456789", "blobs/sha256/zzz", ".index.json123456789"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	// What is to be kept and cannot be read stops it before anything is removed.
	before := stored(t, dir)
	unknown := "sha256:" + strings.Repeat("0", 64)
	if err := pruneLayout(dir, map[string]string{grownDigest: refs[grownDigest], unknown: "x@" + unknown}); !errors.Is(err, errNotFound) {
		t.Errorf("an unknown manifest: %v", err)
	}
	if err := os.Rename(blobPath(dir, baseDigest), blobPath(dir, unknown)); err != nil {
		t.Fatal(err)
	}
	if err := pruneLayout(dir, map[string]string{grownDigest: refs[grownDigest], unknown: "x@" + unknown}); !errors.Is(err, errDamaged) {
		t.Errorf("a damaged manifest: %v", err)
	}
	if err := os.Rename(blobPath(dir, unknown), blobPath(dir, baseDigest)); err != nil {
		t.Fatal(err)
	}
	if after := stored(t, dir); !slices.Equal(before, after) {
		t.Errorf("removed something: %v, had %v", after, before)
	}

	steps := []map[string]string{
		{baseDigest: refs[baseDigest], grownDigest: refs[grownDigest]},
		{grownDigest: refs[grownDigest]},
		{grownDigest: refs[grownDigest]}, // again
		{},
	}
	for _, keep := range steps {
		if err := pruneLayout(dir, keep); err != nil {
			t.Fatal(err)
		}
		var want []string
		for digest := range keep {
			want = append(want, blobs[digest]...)
			if _, err := checkLayout(dir, digest); err != nil {
				t.Error(err)
			}
		}
		if got := stored(t, dir); !slices.Equal(got, hexes(want...)) {
			t.Errorf("kept %v, want %v", got, hexes(want...))
		}
		checkWithLayoutPackage(t, dir, slices.Collect(maps.Values(keep))...)
		if top, _ := filepath.Glob(filepath.Join(dir, ".*")); len(top) != 0 {
			t.Errorf("left %v", top)
		}
	}
	if slices.Contains(stored(t, dir), hexOf(grownConfig)) {
		t.Error("nothing was to be kept")
	}
	if err := pruneLayout(filepath.Join(dir, "none"), nil); err != nil {
		t.Errorf("no layout: %v", err)
	}
}

// fetchChild is set for the process that TestFetchKilled kills: what it fetches, as JSON.
const fetchChild = "TOAD_TEST_FETCH"

func TestFetchKilled(t *testing.T) {
	type job struct{ Host, Dir, Ref string }
	if env := os.Getenv(fetchChild); env != "" {
		var j job
		if err := json.Unmarshal([]byte(env), &j); err != nil {
			t.Fatal(err)
		}
		fetchIt(t, &registry{plainHTTP: []string{j.Host}}, j.Dir, j.Ref)
		t.Fatal("not killed")
	}
	f := newFakeRegistry(t, "127.0.0.1:0", false)
	image := testImage(t, amd64, 2)
	manifest, config, layers := blobsOf(t, image)
	ref := f.push("apps/hello", image)
	dir := t.TempDir()
	half := make(chan struct{})
	over := make(chan struct{})
	f.lies(func(w http.ResponseWriter, _ *http.Request, _, digest string) bool {
		if digest != layers[1] {
			return false
		}
		w.Write(make([]byte, 100))
		w.(http.Flusher).Flush()
		close(half)
		<-over
		return true
	})
	defer close(over)
	env, err := json.Marshal(job{f.host, dir, ref})
	if err != nil {
		t.Fatal(err)
	}
	child := exec.Command(os.Args[0], "-test.run=^TestFetchKilled$")
	child.Env = append(os.Environ(), fetchChild+"="+string(env))
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	<-half
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	child.Wait()
	var whole []string
	for _, name := range stored(t, dir) {
		if !temporaryName.MatchString(name) {
			whole = append(whole, name)
		}
	}
	if want := hexes(config, layers[0]); !slices.Equal(whole, want) {
		t.Errorf("left %v, want %v", whole, want)
	}
	if _, err := checkLayout(dir, manifest); !errors.Is(err, errNotFound) {
		t.Errorf("half an image: %v", err)
	}
	f.lies(nil)
	f.asked()
	if _, err := fetchIt(t, f.registry(), dir, ref); err != nil {
		t.Fatal(err)
	}
	if got := f.asked(); !slices.Equal(got, []string{"manifests " + manifest, "blobs " + layers[1]}) {
		t.Errorf("asked for %v", got)
	}
	if err := pruneLayout(dir, map[string]string{manifest: ref}); err != nil {
		t.Fatal(err)
	}
	if got, want := stored(t, dir), hexes(append(layers, manifest, config)...); !slices.Equal(got, want) {
		t.Errorf("left %v, want %v", got, want)
	}
}
