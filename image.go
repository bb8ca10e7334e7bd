// image.go fetches images by digest from the registry into a service's OCI layout, in their original
// bytes, and verifies, archives and prunes what is there. It is the one place that speaks to a
// registry. It knows nothing of Podman, and what is to be kept it is told.
//
// A blob becomes visible under its digest only whole, verified and durable, and is hashed again
// before it is relied on. go-containerregistry authenticates; its layout package is not used, as it
// syncs nothing and trusts sizes. Calls for one directory must not overlap.
package main

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/renameio/v2"
)

// documentLimit bounds a manifest and a config, which are read into memory.
const documentLimit = 4 << 20

const refName = "org.opencontainers.image.ref.name"

var (
	errDamaged  = errors.New("damaged") // there, but not what its digest says
	errMismatch = errors.New("not what the digest says")
	errRefused  = errors.New("leads where it must not")
	errSettings = errors.New("settings for the registry cannot be read")
)

// imageInfo is what the verified bytes of an image say of it.
type imageInfo struct {
	ConfigID string   // digest of the config, "sha256:…": the id that Podman gives the image
	Size     int64    // bytes of all blobs, the manifest included
	Volumes  []string // paths that the config declares as volumes, sorted
	Blobs    []string // digests of manifest, config and layers, each once
}

// registry is how registries are reached. Auth file and CA file are read anew for each fetch.
type registry struct {
	authFile  string   // a containers auth.json; missing or empty: anonymous
	caFile    string   // trusted beside the system's roots; missing or empty: these alone
	plainHTTP []string // hosts ("registry.example.org:5000") that may be spoken to without TLS
	// ownNetworks gives the subnets of the networks Toad is in; nil: what its interfaces say.
	ownNetworks func() []netip.Prefix

	proxy func(*http.Request) (*url.URL, error) // nil: from the environment
	stall time.Duration                         // the longest wait for an answer's header; 0: 30 s
}

// fetch brings the image ref (repository@sha256:…) whole into the layout dir and returns what it is.
// What is there and whole is not asked for, so a complete image needs no registry. A failure that is
// the registry's or the image's has a code; one of the disk wraps errStorage; when ctx is canceled
// (and not past its deadline) the error is its cause and nothing is said of the registry.
func (r *registry) fetch(ctx context.Context, dir, ref string, limit byteSize, platform string, reserve int64) (imageInfo, error) {
	repository, digest, _ := strings.Cut(ref, "@")
	if !blobDigest.MatchString(digest) {
		return imageInfo{}, fmt.Errorf("fetching %q: not a reference by digest", ref)
	}
	if err := makeDir(filepath.Join(dir, "blobs", "sha256")); err != nil {
		return imageInfo{}, err
	}
	p := &pull{registry: r, repository: repository, dir: dir}
	defer p.close()

	raw, fetched, err := p.obtain(ctx, "manifests", digest)
	if err != nil {
		return imageInfo{}, err
	}
	m, err := parseManifest(raw, digest, platform)
	if err != nil {
		return imageInfo{}, err
	}

	var missing []v1.Descriptor // the config first
	for _, d := range m.blobs {
		if ctx.Err() != nil {
			return imageInfo{}, fetchFailed(ctx, digest, ctx.Err())
		}
		if err := checkBlob(dir, d); absent(err) {
			missing = append(missing, d)
		} else if err != nil {
			return imageInfo{}, err
		}
	}
	if len(missing) > 0 {
		if m.size > int64(limit) {
			return imageInfo{}, failed("image_too_large", nil, digest, m.size, fmt.Sprintf("the enrolled limit is %d", limit))
		}
		// Twice, for Podman needs as much again to load it, most often on the same file system.
		if free, err := freeSpace(dir); err != nil {
			return imageInfo{}, err
		} else if free-reserve < 2*m.size {
			return imageInfo{}, failed("image_too_large", nil, digest, m.size, "the host has not twice that free")
		}
	}
	if len(missing) > 0 && missing[0].Digest == m.config.Digest {
		if err := p.blob(ctx, m.config); err != nil {
			return imageInfo{}, err
		}
		missing = missing[1:]
	}
	info, err := m.info(dir)
	if err != nil {
		return imageInfo{}, err
	}
	if err := info.checkPlatform(digest, platform); err != nil {
		return imageInfo{}, err
	}
	for _, d := range missing {
		if err := p.blob(ctx, d); err != nil {
			return imageInfo{}, err
		}
	}
	// The manifest comes last: where it is, the rest has been.
	if fetched {
		if err := writeFile(blobPath(dir, digest), raw); err != nil {
			return imageInfo{}, err
		}
	}
	if err := addToIndex(dir, m.descriptor(ref)); err != nil {
		return imageInfo{}, err
	}
	// What an earlier run renamed and did not come to sync is relied on as well.
	for _, d := range []string{filepath.Join(dir, "blobs", "sha256"), filepath.Join(dir, "blobs"), dir, filepath.Dir(dir)} {
		if err := syncDir(d); err != nil {
			return imageInfo{}, err
		}
	}
	return info.imageInfo, nil
}

// inspect tells what a fetch would find wrong with an image by its manifest and config alone. It stores
// nothing.
func (r *registry) inspect(ctx context.Context, dir, ref string, limit byteSize, platform string) error {
	repository, digest, _ := strings.Cut(ref, "@")
	p := &pull{registry: r, repository: repository, dir: dir}
	defer p.close()
	raw, fetched, err := p.obtain(ctx, "manifests", digest)
	if err != nil {
		return err
	}
	m, err := parseManifest(raw, digest, platform)
	if err != nil {
		return err
	}
	if fetched && m.size > int64(limit) {
		return failed("image_too_large", nil, digest, m.size, fmt.Sprintf("the enrolled limit is %d", limit))
	}
	config, _, err := p.obtain(ctx, "blobs", m.config.Digest.String())
	if err != nil {
		return err
	}
	info, err := m.describe(config)
	if err != nil {
		return err
	}
	return info.checkPlatform(digest, platform)
}

// checkLayout hashes the manifest of that digest and everything it names. The error is errNotFound
// where something is missing, errDamaged where something is not what its digest says.
func checkLayout(dir, digest string) (imageInfo, error) {
	m, err := readManifest(dir, digest)
	if err != nil {
		return imageInfo{}, err
	}
	for _, d := range m.blobs {
		if err := checkBlob(dir, d); err != nil {
			return imageInfo{}, err
		}
	}
	info, err := m.info(dir)
	return info.imageInfo, err
}

// writeArchive writes the image as the tar that Podman's load takes and stores under ref: an OCI
// layout of this one manifest, its bytes as they are (measured). Each blob is hashed on the
// way; a wrong one ends the archive before its end, which no reader takes for whole.
func writeArchive(w io.Writer, dir, ref, digest string) error {
	m, err := readManifest(dir, digest)
	if err != nil {
		return err
	}
	index, err := encodeIndex(m.descriptor(ref))
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	header := func(name string, size int64) error {
		return t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o644})
	}
	for _, f := range []struct {
		name string
		data []byte
	}{{"oci-layout", layoutFile}, {"index.json", index}, {"blobs/sha256/" + hexOf(digest), m.raw}} {
		if err := header(f.name, int64(len(f.data))); err != nil {
			return fmt.Errorf("archiving %s: %w", f.name, err)
		}
		if _, err := t.Write(f.data); err != nil {
			return fmt.Errorf("archiving %s: %w", f.name, err)
		}
	}
	for _, d := range m.blobs {
		if err := header("blobs/sha256/"+d.Digest.Hex, d.Size); err != nil {
			return fmt.Errorf("archiving blob %s: %w", d.Digest, err)
		}
		if err := copyBlob(t, dir, d); err != nil {
			return fmt.Errorf("archiving: %w", err)
		}
	}
	if err := t.Close(); err != nil {
		return fmt.Errorf("archiving: %w", err)
	}
	return nil
}

// pruneLayout removes what no kept manifest (by digest, with its reference) needs, and what killed
// fetches left behind. A kept manifest that cannot be read is an error, and nothing is removed.
func pruneLayout(dir string, keep map[string]string) error {
	needed := make(map[string]bool)
	var kept []v1.Descriptor
	for _, digest := range slices.Sorted(maps.Keys(keep)) {
		m, err := readManifest(dir, digest)
		if err != nil {
			return fmt.Errorf("pruning: %w", err)
		}
		kept = append(kept, m.descriptor(keep[digest]))
		needed[hexOf(digest)] = true
		for _, d := range m.blobs {
			needed[d.Digest.Hex] = true
		}
	}
	blobs := filepath.Join(dir, "blobs", "sha256")
	entries, err := os.ReadDir(blobs)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // there never was an image
	} else if err != nil {
		return fmt.Errorf("pruning: %w: %w", errStorage, err)
	}
	if err := writeIndex(dir, kept...); err != nil { // first, so that it never names what is gone
		return err
	}
	for _, e := range entries {
		if needed[e.Name()] {
			continue
		}
		if err := removeFile(filepath.Join(blobs, e.Name())); err != nil {
			return err
		}
	}
	return sweepTemporary(dir)
}

// ---- the layout ----

var (
	blobDigest = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	layoutFile = []byte(`{"imageLayoutVersion":"1.0.0"}`)
)

func hexOf(digest string) string { return strings.TrimPrefix(digest, "sha256:") }

func blobPath(dir, digest string) string {
	return filepath.Join(dir, "blobs", "sha256", hexOf(digest))
}

func absent(err error) bool { return errors.Is(err, errNotFound) || errors.Is(err, errDamaged) }

func openBlob(dir, digest string) (*os.File, error) {
	f, err := os.Open(blobPath(dir, digest))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("opening blob %s: %w", digest, errNotFound)
	} else if err != nil {
		return nil, storageError("opening blob", digest, err)
	}
	return f, nil
}

// copyBlob copies a blob to w and says whether it was what its descriptor says.
func copyBlob(w io.Writer, dir string, d v1.Descriptor) error {
	f, err := openBlob(dir, d.Digest.String())
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return storageError("reading blob", d.Digest.String(), err)
	}
	if st.Size() != d.Size {
		return fmt.Errorf("blob %s: %w: it has %d bytes and not %d", d.Digest, errDamaged, st.Size(), d.Size)
	}
	hash := sha256.New()
	source := &sourceReader{r: io.LimitReader(f, d.Size)}
	n, err := io.Copy(io.MultiWriter(w, hash), source)
	if broken := source.broken(); broken != nil { // a bad sector: fetched again, it comes to lie elsewhere
		return fmt.Errorf("reading blob %s: %w: %w", d.Digest, errDamaged, broken)
	} else if err != nil {
		return fmt.Errorf("copying blob %s: %w", d.Digest, err)
	}
	if n != d.Size || hex.EncodeToString(hash.Sum(nil)) != d.Digest.Hex {
		return fmt.Errorf("blob %s: %w", d.Digest, errDamaged)
	}
	return nil
}

func checkBlob(dir string, d v1.Descriptor) error { return copyBlob(io.Discard, dir, d) }

// readBlob reads a manifest or config whole and verified.
func readBlob(dir, digest string) ([]byte, error) {
	f, err := openBlob(dir, digest)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, documentLimit+1))
	if err != nil {
		return nil, fmt.Errorf("reading blob %s: %w: %w", digest, errDamaged, err)
	}
	if digestBytes(data) != digest {
		return nil, fmt.Errorf("blob %s: %w", digest, errDamaged)
	}
	return data, nil
}

func digestBytes(data []byte) string { return "sha256:" + sumHex(data) }

// encodeIndex is an index.json. It is for other tools and for Podman's load; what is kept follows
// from the records, never from it.
func encodeIndex(manifests ...v1.Descriptor) ([]byte, error) {
	return json.MarshalIndent(map[string]any{
		"schemaVersion": 2,
		"mediaType":     types.OCIImageIndex,
		"manifests":     slices.Concat([]v1.Descriptor{}, manifests),
	}, "", "  ")
}

func writeIndex(dir string, manifests ...v1.Descriptor) error {
	index, err := encodeIndex(manifests...)
	if err != nil {
		return err
	}
	if err := writeFile(filepath.Join(dir, "oci-layout"), layoutFile); err != nil {
		return err
	}
	return writeFile(filepath.Join(dir, "index.json"), index)
}

// addToIndex writes the index with one manifest more; what cannot be read of the old one is dropped.
func addToIndex(dir string, d v1.Descriptor) error {
	var index v1.IndexManifest
	if data, err := os.ReadFile(filepath.Join(dir, "index.json")); err == nil && json.Unmarshal(data, &index) != nil {
		index.Manifests = nil
	}
	manifests := slices.DeleteFunc(index.Manifests, func(old v1.Descriptor) bool {
		return old.Annotations[refName] == d.Annotations[refName]
	})
	return writeIndex(dir, append(manifests, d)...)
}

func freeSpace(dir string) (int64, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return 0, storageError("asking for the free space of", dir, err)
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}

// ---- manifests ----

// manifest is a verified manifest of one platform's image.
type manifest struct {
	raw       []byte
	digest    string
	mediaType types.MediaType
	config    v1.Descriptor
	blobs     []v1.Descriptor // config and layers, each once
	size      int64           // of manifest and blobs
}

func readManifest(dir, digest string) (*manifest, error) {
	raw, err := readBlob(dir, digest)
	if err != nil {
		return nil, err
	}
	return parseManifest(raw, digest, "")
}

// parseManifest judges a manifest by its bytes alone, so that it is judged the same from the registry
// and from the disk. For an index the digest of this platform's manifest is looked up.
func parseManifest(raw []byte, digest, platform string) (*manifest, error) {
	unsupported := func(err error, reason string) error {
		return failed("unsupported_manifest", err, digest, reason)
	}
	var doc struct {
		v1.Manifest
		Manifests []v1.Descriptor `json:"manifests"`
	}
	if len(raw) > documentLimit {
		return nil, unsupported(nil, "it is larger than 4 MiB")
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		return nil, unsupported(err, "it cannot be read as a manifest")
	}
	if doc.SchemaVersion != 2 {
		return nil, unsupported(nil, "its schema version is not 2")
	}
	// The OCI specification lets the media type be left out.
	switch isIndex := doc.Manifests != nil; {
	case isIndex && (doc.Config.MediaType != "" || doc.Layers != nil):
		return nil, unsupported(nil, "it is manifest and index in one")
	case doc.MediaType == "" && isIndex:
		doc.MediaType = types.OCIImageIndex
	case doc.MediaType == "" && doc.Config.MediaType != "":
		doc.MediaType = types.OCIManifestSchema1
	}
	if doc.MediaType.IsIndex() {
		for _, d := range doc.Manifests {
			if d.Platform != nil && d.MediaType.IsImage() && d.Digest.Algorithm == "sha256" &&
				samePlatform(d.Platform.OS+"/"+d.Platform.Architecture, platform) {
				return nil, failed("not_single_platform", nil, digest, platform, d.Digest.String())
			}
		}
		return nil, failed("not_single_platform", nil, digest, platform, "not in it")
	}
	if !doc.MediaType.IsImage() {
		return nil, unsupported(nil, "it is of another media type")
	}
	if !doc.Config.MediaType.IsConfig() {
		return nil, unsupported(nil, "it is an artifact and no image")
	}
	if doc.Config.Size > documentLimit {
		return nil, unsupported(nil, "its config is larger than 4 MiB")
	}
	m := &manifest{raw: raw, digest: digest, mediaType: doc.MediaType, config: doc.Config, size: int64(len(raw))}
	seen := make(map[v1.Hash]int64)
	for i, d := range slices.Concat([]v1.Descriptor{doc.Config}, doc.Layers) {
		size, again := seen[d.Digest]
		switch {
		case i > 0 && !(d.MediaType.IsLayer() && d.MediaType.IsDistributable()):
			return nil, unsupported(nil, "a layer is of another media type")
		case len(d.URLs) > 0:
			return nil, unsupported(nil, "it refers to other places by URL")
		case d.Digest.Algorithm != "sha256":
			return nil, unsupported(nil, "it names a blob by another digest than sha256")
		case d.Size < 0 || d.Size > 1<<40: // so that no sum overflows: 4 MiB hold no 2^20 descriptors
			return nil, unsupported(nil, "it names a blob of impossible size")
		case again && size != d.Size:
			return nil, unsupported(nil, "it names one blob with two sizes")
		case again:
			continue
		}
		seen[d.Digest] = d.Size
		m.blobs = append(m.blobs, d)
		m.size += d.Size
	}
	return m, nil
}

// descriptor is the manifest's entry in an index.json.
func (m *manifest) descriptor(ref string) v1.Descriptor {
	return v1.Descriptor{
		MediaType:   m.mediaType,
		Digest:      v1.Hash{Algorithm: "sha256", Hex: hexOf(m.digest)},
		Size:        int64(len(m.raw)),
		Annotations: map[string]string{refName: ref},
	}
}

type platformInfo struct {
	imageInfo
	platform string // of the config: whatever the image's author wrote
}

// info reads the config, which must be there.
func (m *manifest) info(dir string) (platformInfo, error) {
	raw, err := readBlob(dir, m.config.Digest.String())
	if err != nil {
		return platformInfo{}, err
	}
	return m.describe(raw)
}

// describe reads the bytes of the config.
func (m *manifest) describe(raw []byte) (platformInfo, error) {
	var config struct {
		OS           string `json:"os"`
		Architecture string `json:"architecture"`
		Config       struct{ Volumes map[string]any }
	}
	if err := json.Unmarshal(raw, &config); err != nil {
		return platformInfo{}, failed("unsupported_manifest", err, m.digest, "its config cannot be read")
	}
	info := platformInfo{platform: config.OS + "/" + config.Architecture}
	info.ConfigID = m.config.Digest.String()
	info.Size = m.size
	info.Volumes = slices.Sorted(maps.Keys(config.Config.Volumes))
	info.Blobs = []string{m.digest}
	for _, d := range m.blobs {
		info.Blobs = append(info.Blobs, d.Digest.String())
	}
	return info, nil
}

// checkPlatform refuses the image of that digest on any other platform than its own.
func (i platformInfo) checkPlatform(digest, platform string) error {
	if !samePlatform(i.platform, platform) {
		return failed("wrong_platform", nil, digest, publicPlatform(i.platform), platform)
	}
	return nil
}

// samePlatform compares system and architecture; a variant is not looked at.
func samePlatform(a, b string) bool {
	two := func(s string) string { return strings.Join(strings.SplitN(s+"//", "/", 3)[:2], "/") }
	return two(a) == two(b)
}

var plainPlatform = regexp.MustCompile(`^[a-z0-9_]{1,20}/[a-z0-9_]{1,20}$`)

// publicPlatform is a platform from an image's config, as far as it can be repeated to others.
func publicPlatform(platform string) string {
	if plainPlatform.MatchString(platform) {
		return platform
	}
	return "an unknown platform"
}

// ---- the registry ----

// pull is one fetch's conversation with the registry, begun when something has to be asked for.
type pull struct {
	registry   *registry
	repository string
	dir        string

	repo   name.Repository
	client *http.Client
	base   *http.Transport
}

func (p *pull) close() {
	if p.base != nil {
		p.base.CloseIdleConnections()
	}
}

// obtain reads a manifest or a config from the layout, or fetches it.
func (p *pull) obtain(ctx context.Context, kind, digest string) (raw []byte, fetched bool, err error) {
	if raw, err = readBlob(p.dir, digest); absent(err) {
		raw, err = p.document(ctx, kind, digest)
		fetched = true
	}
	return raw, fetched, err
}

// document fetches the bytes of a manifest or a config and verifies them.
func (p *pull) document(ctx context.Context, kind, digest string) ([]byte, error) {
	resp, err := p.get(ctx, kind, digest)
	if err != nil {
		return nil, fetchFailed(ctx, digest, err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, documentLimit+1))
	if err != nil {
		return nil, fetchFailed(ctx, digest, err)
	}
	if len(raw) > documentLimit {
		return nil, failed("unsupported_manifest", nil, digest, "it is larger than 4 MiB")
	}
	if digestBytes(raw) != digest {
		return nil, failed("digest_mismatch", errMismatch, digest)
	}
	return raw, nil
}

// blob fetches one blob into the layout: through a temporary file, bounded, hashed, synced, renamed.
func (p *pull) blob(ctx context.Context, d v1.Descriptor) error {
	digest := d.Digest.String()
	resp, err := p.get(ctx, "blobs", digest)
	if err != nil {
		return fetchFailed(ctx, digest, err)
	}
	defer resp.Body.Close()
	if resp.ContentLength >= 0 && resp.ContentLength != d.Size {
		return failed("digest_mismatch", errMismatch, digest)
	}
	path := blobPath(p.dir, digest)
	if err := boundary("write", path); err != nil {
		return storageError("writing", path, err)
	}
	f, err := renameio.NewPendingFile(path, renameio.WithTempDir(filepath.Dir(path)), renameio.WithStaticPermissions(0o600))
	if err != nil {
		return storageError("writing", path, err)
	}
	defer f.Cleanup()
	hash := sha256.New()
	source := &sourceReader{r: io.LimitReader(resp.Body, d.Size+1)}
	n, err := io.Copy(io.MultiWriter(f, hash), source)
	if broken := source.broken(); broken != nil {
		return fetchFailed(ctx, digest, broken)
	} else if err != nil {
		return storageError("writing", path, err)
	}
	if n != d.Size || hex.EncodeToString(hash.Sum(nil)) != d.Digest.Hex {
		return failed("digest_mismatch", errMismatch, digest)
	}
	if err := boundary("replace", path); err != nil {
		return storageError("writing", path, err)
	}
	if err := f.CloseAtomicallyReplace(); err != nil { // fsync, close, rename
		return storageError("writing", path, err)
	}
	return syncDir(filepath.Dir(path))
}

// get asks for something of the repository; the answer's status is 200.
func (p *pull) get(ctx context.Context, kind, digest string) (*http.Response, error) {
	if p.client == nil {
		if err := p.open(ctx); err != nil {
			return nil, err
		}
	}
	// The scheme is set to what the handshake found to work.
	u := fmt.Sprintf("https://%s/v2/%s/%s/%s", p.repo.RegistryStr(), p.repo.RepositoryStr(), kind, digest)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		return nil, err
	}
	if kind == "manifests" {
		req.Header.Set("Accept", fmt.Sprintf("%s, %s, %s, %s",
			types.OCIManifestSchema1, types.DockerManifestSchema2, types.OCIImageIndex, types.DockerManifestList))
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return nil, err
	}
	if err := transport.CheckError(resp, http.StatusOK); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// open reads credentials and CA and goes through the registry's handshake.
func (p *pull) open(ctx context.Context) (err error) {
	r := p.registry
	options := []name.Option{name.StrictValidation}
	host, _, _ := strings.Cut(p.repository, "/")
	if slices.Contains(r.plainHTTP, host) {
		options = append(options, name.Insecure)
	}
	if p.repo, err = name.NewRepository(p.repository, options...); err != nil {
		return err
	}
	auth, err := r.credentials(p.repository)
	if err != nil {
		return err
	}
	roots, err := r.roots()
	if err != nil {
		return err
	}
	g := &guard{registry: hostOnly(p.repo.RegistryStr()), plain: r.plainHTTP, home: make(map[netip.Prefix]bool)}
	if g.own, err = r.own(); err != nil {
		return err
	}
	g.findProxy = r.proxy
	if g.findProxy == nil {
		g.findProxy = http.ProxyFromEnvironment
	}
	stall := r.stall
	if stall == 0 {
		stall = 30 * time.Second
	}
	p.base = &http.Transport{
		Proxy:                 g.proxy,
		DialContext:           g.dial,
		TLSClientConfig:       &tls.Config{RootCAs: roots},
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: stall,
		DisableCompression:    true,
		ForceAttemptHTTP2:     true,
	}
	g.inner = p.base
	// A blip of the network or of the registry is bridged: three tries within half a second.
	retry := transport.NewRetry(g, transport.WithRetryStatusCodes(http.StatusTooManyRequests,
		http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout))
	authenticated, err := transport.NewWithContext(ctx, p.repo.Registry, auth, retry, []string{p.repo.Scope(transport.PullScope)})
	if err != nil {
		return err
	}
	p.client = &http.Client{Transport: authenticated}
	return nil
}

// credentials finds the entry of the auth file for a repository: the most specific key of
// host/path/name, host/path, host (containers-auth.json(5)).
func (r *registry) credentials(repository string) (authn.Authenticator, error) {
	data, err := os.ReadFile(r.authFile)
	if errors.Is(err, fs.ErrNotExist) || r.authFile == "" || err == nil && len(data) == 0 {
		return authn.Anonymous, nil
	} else if err != nil {
		return nil, fmt.Errorf("%w: %w", errSettings, err)
	}
	var file struct{ Auths map[string]json.RawMessage }
	if json.Unmarshal(data, &file) != nil { // its error could quote the file
		return nil, fmt.Errorf("%w: %s is not valid", errSettings, r.authFile)
	}
	for key := repository; ; {
		if entry, ok := file.Auths[key]; ok {
			var config authn.AuthConfig
			if json.Unmarshal(entry, &config) != nil {
				return nil, fmt.Errorf("%w: the entry of %s in %s is not valid", errSettings, key, r.authFile)
			}
			return authn.FromConfig(config), nil
		}
		i := strings.LastIndexByte(key, '/')
		if i < 0 {
			return authn.Anonymous, nil
		}
		key = key[:i]
	}
}

func (r *registry) roots() (*x509.CertPool, error) {
	data, err := os.ReadFile(r.caFile)
	if errors.Is(err, fs.ErrNotExist) || r.caFile == "" || err == nil && len(data) == 0 {
		return nil, nil // the system's
	} else if err != nil {
		return nil, fmt.Errorf("%w: %w", errSettings, err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("%w: no certificate in %s", errSettings, r.caFile)
	}
	return pool, nil
}

// own gives the subnets that nothing but the registry itself may lead into: those of Toad's networks,
// and in any case this host's own loopback and link-local addresses.
func (r *registry) own() ([]netip.Prefix, error) {
	own := slices.Clone(localOnly)
	if r.ownNetworks != nil {
		return append(own, r.ownNetworks()...), nil
	}
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("reading the addresses of the interfaces: %w", err)
	}
	for _, a := range addresses {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			own = append(own, prefix.Masked())
		}
	}
	return own, nil
}

var localOnly = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("::/128"), netip.MustParsePrefix("::1/128"), netip.MustParsePrefix("fe80::/10"),
}

// guard stands between all that is sent in a fetch and the network, redirects and token realms
// included: TLS only, but for the hosts named, and no way into Toad's own networks.
type guard struct {
	registry  string // host name of the registry
	plain     []string
	own       []netip.Prefix
	findProxy func(*http.Request) (*url.URL, error)
	inner     http.RoundTripper

	mu      sync.Mutex
	home    map[netip.Prefix]bool // the own networks that the registry itself turned out to be in
	proxies []string              // host names of proxies in use
}

func (g *guard) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" && !(req.URL.Scheme == "http" && slices.Contains(g.plain, req.URL.Host)) {
		return nil, fmt.Errorf("%s to %s: %w", req.URL.Scheme, req.URL.Host, errRefused)
	}
	return g.inner.RoundTrip(req)
}

func (g *guard) proxy(req *http.Request) (*url.URL, error) {
	u, err := g.findProxy(req)
	if u != nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.proxies = append(g.proxies, u.Hostname())
	}
	return u, err
}

func (g *guard) dial(ctx context.Context, network, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: 10 * time.Second, Control: func(_, resolved string, _ syscall.RawConn) error {
		return g.admit(hostOnly(address), resolved)
	}}
	return d.DialContext(ctx, network, address)
}

// admit judges the address that a host name resolved to, just before it is connected to: the registry
// may be anywhere, the operator's proxy as well, any other host in none of Toad's own networks but
// those that the registry itself is in. Behind a proxy the proxy has to judge.
func (g *guard) admit(host, resolved string) error {
	at, err := netip.ParseAddrPort(resolved)
	if err != nil {
		return err
	}
	ip := at.Addr().Unmap().WithZone("")
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, prefix := range g.own {
		switch {
		case !prefix.Contains(ip):
		case host == g.registry:
			g.home[prefix] = true
		case !g.home[prefix] && !slices.Contains(g.proxies, host):
			return fmt.Errorf("%s is in %s: %w", host, prefix, errRefused)
		}
	}
	return nil
}

// hostOnly is a host without its port.
func hostOnly(hostport string) string {
	return (&url.URL{Host: hostport}).Hostname()
}

// fetchFailed makes the error of what went wrong between Toad and the registry.
func fetchFailed(ctx context.Context, digest string, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return fmt.Errorf("fetching %s: %w", digest, context.Cause(ctx))
	}
	reason := "the registry's answer is not acceptable"
	var status *transport.Error
	var network net.Error // *url.Error is one
	switch {
	case ctx.Err() != nil:
		reason = "the fetch deadline passed"
	case errors.Is(err, errSettings):
		reason = "the host's settings for the registry cannot be read"
	case errors.As(err, new(*tls.CertificateVerificationError)):
		reason = "the registry's certificate is not trusted"
	case errors.Is(err, errRefused):
		reason = "the way there is not allowed: plain HTTP, or into a network of Toad's own"
	case errors.As(err, &status) && (status.StatusCode == http.StatusUnauthorized || status.StatusCode == http.StatusForbidden):
		reason = "the registry denied access"
	case errors.As(err, &status) && status.StatusCode == http.StatusNotFound:
		reason = "the registry does not have it"
	case errors.As(err, &status):
		reason = fmt.Sprintf("the registry answered with status %d", status.StatusCode)
	case errors.As(err, &network) && network.Timeout():
		reason = "the registry did not answer in time"
	case errors.As(err, &network) || errors.Is(err, io.ErrUnexpectedEOF):
		reason = "no connection, or it broke off"
	}
	return failed("fetch_failed", withoutSecrets(err), digest, reason)
}

// withoutSecrets keeps of an error what is known to hold no URL, header or body: these can carry
// signatures, tokens and passwords.
func withoutSecrets(err error) error {
	var (
		status  *transport.Error
		request *url.Error
		op      *net.OpError
		dns     *net.DNSError
		cert    *tls.CertificateVerificationError
		errno   syscall.Errno
	)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errRefused) && !errors.As(err, &request), errors.Is(err, errSettings):
		return err // Toad's own words
	case errors.As(err, &status):
		codes := []string{}
		for _, d := range status.Errors {
			codes = append(codes, fmt.Sprintf("%.40q", string(d.Code)))
		}
		return fmt.Errorf("status %d from %s %s", status.StatusCode, status.Request.URL.Host, strings.Join(codes, " "))
	case errors.As(err, &request):
		host := "?"
		if u, err := url.Parse(request.URL); err == nil {
			host = u.Host
		}
		return fmt.Errorf("%s %s: %w", request.Op, host, withoutSecrets(request.Err))
	case errors.As(err, &op):
		return op
	case errors.As(err, &dns):
		return dns
	case errors.As(err, &cert):
		return cert
	case errors.As(err, &errno):
		return errno
	}
	for _, known := range []error{context.Canceled, context.DeadlineExceeded, io.ErrUnexpectedEOF, io.EOF, http.ErrSchemeMismatch} {
		if errors.Is(err, known) {
			return known
		}
	}
	return fmt.Errorf("an error of type %T", err)
}

// sourceReader remembers the error of the reader it reads, to tell it from the writer's.
type sourceReader struct {
	r   io.Reader
	mu  sync.Mutex
	err error
}

func (s *sourceReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.mu.Lock()
		s.err = err
		s.mu.Unlock()
	}
	return n, err
}

func (s *sourceReader) broken() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}
