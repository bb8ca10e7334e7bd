package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	yaml "github.com/pb33f/go-yaml"
	"github.com/pb33f/libopenapi"
	validator "github.com/pb33f/libopenapi-validator"
	"github.com/pb33f/libopenapi-validator/config"
	"github.com/pb33f/libopenapi-validator/content"
	validation "github.com/pb33f/libopenapi-validator/errors"
)

// The description is the contract with programs: whatever a test asks of a server, in memory or on the
// lab, goes through checkExchange, so that an answer that is not as described fails that test.

// theDescription is what judges: the document as it is served.
var theDescription = sync.OnceValues(func() (validator.Validator, error) {
	b, err := os.ReadFile("openapi.json")
	if err != nil {
		return nil, err
	}
	doc, err := libopenapi.NewDocument(b)
	if err != nil {
		return nil, err
	}
	v, errs := validator.NewValidator(doc, config.WithFormatAssertions(), config.WithRejectUndeclaredRequestBody(), config.WithRejectUnsupportedBodyContent(),
		config.WithStandardBodyDecoders(), config.WithBodyDecoder("application/x-ndjson", documents("")), config.WithBodyDecoder("text/event-stream", documents("data: ")),
		config.WithBodyDecoder("application/octet-stream", anything), config.WithBodyDecoder("application/x-tar", anything))
	return v, errors.Join(errs...)
})

// documents decodes the lines with that prefix, a JSON document each.
func documents(prefix string) content.Decoder {
	return content.DecoderFunc(func(in *content.DecodeInput) (any, error) {
		b, err := io.ReadAll(in.Body)
		if err != nil {
			return nil, err
		}
		list := []any{}
		for line := range strings.Lines(string(b)) {
			text, ok := strings.CutPrefix(line, prefix)
			if !ok {
				continue
			}
			var v any
			if err := json.Unmarshal([]byte(text), &v); err != nil {
				return nil, fmt.Errorf("%q: %w", line, err)
			}
			list = append(list, v)
		}
		return list, nil
	})
}

var anything = content.DecoderFunc(func(in *content.DecodeInput) (any, error) { return "", nil })

// exchange is one request with its answer.
type exchange struct {
	request *http.Request
	sent    []byte
	status  int
	header  http.Header
	body    []byte
}

// checkExchange says what of it is not as the description has it. A request that it does not allow must be
// refused; an answer must be one that it names, and be so in every member.
func checkExchange(x exchange) error {
	v, err := theDescription()
	if err != nil {
		return err
	}
	fail := func(what string, errs []*validation.ValidationError) error {
		var b strings.Builder
		for _, e := range errs {
			fmt.Fprintf(&b, "\n%s", e)
			for _, s := range e.SchemaValidationErrors {
				fmt.Fprintf(&b, "\n  %s %s: %s", s.FieldPath, s.KeywordLocation, s.Reason)
			}
		}
		return fmt.Errorf("openapi.yaml: %s %s: %s\nsent: %.300s\nstatus %d: %s%s", x.request.Method, x.request.URL, what, x.sent, x.status, x.body, b.String())
	}
	r := x.request.Clone(x.request.Context())
	if r.Method == http.MethodHead {
		r.Method = http.MethodGet
	}
	r.Body, r.GetBody, r.ContentLength = io.NopCloser(bytes.NewReader(x.sent)), nil, int64(len(x.sent))
	if r.Header.Get("Content-Type") == "" && len(x.sent) > 0 {
		r.Header.Set("Content-Type", "application/json") // it need not be said
	}
	good, errs := v.ValidateHttpRequestSync(r)
	if path.Clean(r.URL.Path) != r.URL.Path || slices.ContainsFunc(errs, func(e *validation.ValidationError) bool { return e.IsPathMissingError() || e.IsOperationMissingError() }) {
		// What is not there is a problem of one of three kinds.
		var p problem
		dec := json.NewDecoder(bytes.NewReader(x.body))
		dec.DisallowUnknownFields()
		err := dec.Decode(&p)
		known := p.Code == "not_found" && x.status == 404 || p.Code == "invalid_request" && x.status == 405 && x.header.Get("Allow") != "" || p.Code == "unauthorized" && x.status == 401
		if err != nil || !known || p.Status != x.status || p.Title == "" || p.Detail == "" || x.header.Get("Content-Type") != "application/problem+json" {
			return fail("it is not described, and not refused as such", errs)
		}
		return nil
	}
	if !good && x.status < 400 {
		return fail("the request is not allowed, and was answered", errs)
	}
	if x.request.Method == http.MethodHead {
		return nil
	}
	if len(x.body) == 0 && !strings.HasSuffix(x.request.URL.Path, "/output") {
		return fail("the answer is empty", nil)
	}
	r.Body = io.NopCloser(bytes.NewReader(x.sent))
	resp := &http.Response{StatusCode: x.status, Header: x.header, Body: io.NopCloser(bytes.NewReader(x.body)), ContentLength: int64(len(x.body)), Request: r}
	if ok, errs := v.ValidateHttpResponse(r, resp); !ok {
		return fail("the answer is not as described", errs)
	}
	return nil
}

// described is a handler whose every exchange is checked.
func described(t testing.TB, h http.Handler) http.Handler {
	if _, err := theDescription(); err != nil { // before, and not within, anybody's bubble
		t.Fatal(err)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var sent []byte
		if r.Body != nil {
			var err error
			if sent, err = io.ReadAll(r.Body); err != nil {
				t.Error(err)
			}
		}
		request := r.Clone(r.Context())
		r.Body = io.NopCloser(bytes.NewReader(sent))
		rec := &recording{ResponseWriter: w}
		h.ServeHTTP(rec, r)
		if rec.status == 0 && r.Context().Err() != nil {
			return // nobody was there to be answered
		}
		if rec.status == 0 {
			rec.WriteHeader(http.StatusOK)
		}
		if err := checkExchange(exchange{request, sent, rec.status, rec.header, rec.body.Bytes()}); err != nil {
			t.Error(err)
		}
	})
}

// recording keeps what is answered.
type recording struct {
	http.ResponseWriter
	status int
	header http.Header
	body   bytes.Buffer
}

func (r *recording) Unwrap() http.ResponseWriter { return r.ResponseWriter }

func (r *recording) WriteHeader(status int) {
	if r.status == 0 {
		r.status, r.header = status, r.Header().Clone()
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recording) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.WriteHeader(http.StatusOK)
	}
	r.body.Write(b)
	return r.ResponseWriter.Write(b)
}

// describedTransport is a transport whose every exchange is checked: an answer that is not as described is
// an error of the request, or of reading its body to the end.
type describedTransport struct{ http.RoundTripper }

var errNotDescribed = errors.New("not as described")

func (d describedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	var sent []byte
	if r.Body != nil {
		var err error
		if sent, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
		r = r.Clone(r.Context())
		r.Body = io.NopCloser(bytes.NewReader(sent))
	}
	resp, err := d.RoundTripper.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	checked := &checkedBody{ReadCloser: resp.Body, x: exchange{request: r, sent: sent, status: resp.StatusCode, header: resp.Header}}
	resp.Body = checked
	if ct := resp.Header.Get("Content-Type"); ct == "application/json" || ct == "application/problem+json" {
		b, err := io.ReadAll(checked) // who decodes one document does not read to the end
		if err != nil {
			return nil, err
		}
		resp.Body = io.NopCloser(bytes.NewReader(b))
	}
	return resp, nil
}

type checkedBody struct {
	io.ReadCloser
	x exchange
}

func (c *checkedBody) Read(b []byte) (int, error) {
	n, err := c.ReadCloser.Read(b)
	c.x.body = append(c.x.body, b[:n]...)
	if err == io.EOF {
		if bad := checkExchange(c.x); bad != nil {
			return n, fmt.Errorf("%w: %w", errNotDescribed, bad)
		}
	}
	return n, err
}

// TestDescriptionIsServedAsItIsWritten: openapi.json, which is served, is openapi.yaml. -update makes it.
func TestDescriptionIsServedAsItIsWritten(t *testing.T) {
	b, err := os.ReadFile("openapi.yaml")
	must(t, err)
	var doc any
	must(t, yaml.Unmarshal(b, &doc))
	want, err := json.MarshalIndent(doc, "", " ")
	must(t, err)
	want = append(want, '\n')
	if *update {
		must(t, os.WriteFile("openapi.json", want, 0o644))
	} else if !bytes.Equal(description, want) {
		t.Fatal("openapi.json is not what openapi.yaml says: run with -update")
	}
	v, err := theDescription()
	must(t, err)
	if ok, errs := v.ValidateDocument(); !ok {
		t.Errorf("no valid document: %v", errs)
	}
}

func TestDescriptionExamples(t *testing.T) {
	v, err := theDescription()
	must(t, err)
	var doc map[string]any
	must(t, json.Unmarshal(description, &doc))
	at := func(v any, path ...string) any {
		for _, p := range path {
			m, _ := v.(map[string]any)
			v = m[p]
		}
		return v
	}
	resolve := func(v any) any {
		if ref, ok := at(v, "$ref").(string); ok {
			return at(doc, strings.Split(strings.TrimPrefix(ref, "#/"), "/")...)
		}
		return v
	}
	seen := 0
	for path, item := range doc["paths"].(map[string]any) {
		for method, op := range item.(map[string]any) {
			if method == "parameters" {
				continue
			}
			url := "http://127.0.0.1:8440" + strings.NewReplacer("{id}", noSuchID, "{service}", "hello").Replace(path)
			if path == "/v1/tokens/{id}" {
				url = "http://127.0.0.1:8440/v1/tokens/abcdefgh2345"
			}
			for mt, media := range asMap(at(resolve(at(op, "requestBody")), "content")) {
				for name, example := range examplesOf(media, resolve) {
					seen++
					b, _ := json.Marshal(example)
					r := httptest.NewRequest(strings.ToUpper(method), url, bytes.NewReader(b))
					r.Header.Set("Content-Type", mt)
					r.Header.Set("Authorization", "Bearer t")
					if ok, errs := v.ValidateHttpRequestSync(r); !ok {
						t.Errorf("%s %s, the request %s: %v", method, path, name, errs)
					}
				}
			}
			for status, answer := range asMap(at(op, "responses")) {
				for mt, media := range asMap(at(resolve(answer), "content")) {
					for name, example := range examplesOf(media, resolve) {
						seen++
						b, _ := json.Marshal(example)
						if lines, ok := example.([]any); ok {
							b = nil
							for _, l := range lines {
								line, _ := json.Marshal(l)
								b = append(append(b, line...), '\n')
							}
						}
						n, _ := strconv.Atoi(status)
						x := exchange{httptest.NewRequest(strings.ToUpper(method), url, nil), nil, n,
							http.Header{"Content-Type": {mt}, "Location": {"/v1/operations/" + noSuchID}, "Retry-After": {"1"}}, b}
						if ok, errs := v.ValidateHttpResponse(x.request, &http.Response{StatusCode: n, Header: x.header, Body: io.NopCloser(bytes.NewReader(b)), Request: x.request}); !ok {
							t.Errorf("%s %s, the answer %s %s: %v", method, path, status, name, errs)
						}
					}
				}
			}
		}
	}
	if seen < 30 {
		t.Errorf("only %d examples", seen)
	}
}

func asMap(v any) map[string]any {
	m, _ := v.(map[string]any)
	return m
}

// examplesOf are the examples of a media type, by name.
func examplesOf(media any, resolve func(any) any) map[string]any {
	all := map[string]any{}
	if e, ok := asMap(media)["example"]; ok {
		all["example"] = e
	}
	for name, e := range asMap(asMap(media)["examples"]) {
		all[name] = asMap(resolve(e))["value"]
	}
	return all
}

func TestDescriptionHasEveryRoute(t *testing.T) {
	routed := map[string]bool{}
	for _, rt := range (&daemon{}).routes() {
		routed[rt.pattern] = true
	}
	var doc struct {
		Paths map[string]map[string]any `json:"paths"`
	}
	must(t, json.Unmarshal(description, &doc))
	var documented []string
	for path, item := range doc.Paths {
		for method := range item {
			if method != "parameters" {
				documented = append(documented, strings.ToUpper(method)+" "+path)
			}
		}
	}
	slices.Sort(documented)
	if diff := cmp.Diff(documented, slices.Sorted(maps.Keys(routed))); diff != "" {
		t.Errorf("routes (-described +routed):\n%s", diff)
	}
}

// TestDescriptionNamesEveryCode: each code of a refusal and of a failure is in the description, and none else.
func TestDescriptionNamesEveryCode(t *testing.T) {
	var doc struct {
		Components struct {
			Schemas map[string]struct {
				Enum       []string `json:"enum"`
				Properties struct {
					Code struct {
						Const string `json:"const"`
					} `json:"code"`
					Status struct {
						Const int `json:"const"`
					} `json:"status"`
				} `json:"properties"`
				Required []string
			} `json:"schemas"`
		} `json:"components"`
	}
	dec := json.NewDecoder(bytes.NewReader(description))
	_ = dec.Decode(&doc) // other schemas have other properties
	described := map[string]int{}
	for _, s := range doc.Components.Schemas {
		if c := s.Properties.Code.Const; c != "" {
			described[c] = s.Properties.Status.Const
		}
	}
	described["invalid_request"] = 400 // and 405, and 413
	for code, status := range statuses {
		if described[code] != status {
			t.Errorf("%s has status %d, and %d in the description", code, status, described[code])
		}
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(publicTexts)), slices.Sorted(slices.Values(doc.Components.Schemas["FailureCode"].Enum))); diff != "" {
		t.Errorf("failure codes (-texts +described):\n%s", diff)
	}
}

// TestDescriptionCatches: the judge of all other tests does judge.
func TestDescriptionCatches(t *testing.T) {
	ok := func(body string) exchange {
		return exchange{httptest.NewRequest("GET", "http://toad/v1/version", nil), nil, 200, http.Header{"Content-Type": {"application/json"}}, []byte(body)}
	}
	problem := func(status int, body string) exchange {
		x := ok(body)
		x.request = httptest.NewRequest("POST", "http://toad/v1/deployments", nil)
		x.sent = []byte(deployBody("hello", cliImage, 1, "k"))
		x.status, x.header = status, http.Header{"Content-Type": {"application/problem+json"}}
		return x
	}
	log := ok(`{"seq":1,"at":"2026-11-24T09:30:00.000Z","state":"preparing","code":"accepted","text":"x"}` + "\n")
	log.request = httptest.NewRequest("GET", "http://toad/v1/operations/"+noSuchID+"/log", nil)
	log.header = http.Header{"Content-Type": {"application/x-ndjson"}}
	const stale = `{"title":"stale generation","status":409,"code":"stale_generation","detail":"x","current_generation":7}`
	for what, x := range map[string]exchange{"a version": ok(`{"version":"v1","go":"go1.26"}`), "a problem": problem(409, stale), "a log": log} {
		if err := checkExchange(x); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}

	accepted := problem(200, stale)
	accepted.sent = []byte(`{"service":"hello"}`)
	other := ok(`{"version":"v1","go":"go1.26"}`)
	other.header = http.Header{"Content-Type": {"text/html"}}
	nowhere := ok(`{"version":"v1","go":"go1.26"}`)
	nowhere.request = httptest.NewRequest("GET", "http://toad/v1/nowhere", nil)
	badLog := log
	badLog.body = append(slices.Clone(log.body), []byte(`{"seq":2,"at":"yesterday","state":"preparing","code":"accepted","text":"x"}`+"\n")...)
	for what, x := range map[string]exchange{
		"a member that is missing": ok(`{"version":"v1"}`), "one that is not described": ok(`{"version":"v1","go":"go1.26","path":"/data"}`),
		"another type": ok(`{"version":1,"go":"go1.26"}`), "no JSON": ok(`version 1`), "nothing": ok(``), "another kind of content": other,
		"another status":          problem(418, stale),
		"a code of another one":   problem(404, stale),
		"a code without a member": problem(409, `{"title":"stale generation","status":409,"code":"stale_generation","detail":"x"}`),
		"a member of another":     problem(409, strings.Replace(stale, `"current_generation":7`, `"current_generation":7,"operation_id":"`+noSuchID+`"`, 1)),
		"an accepted bad request": accepted, "a route that is not described": nowhere, "a bad line": badLog,
	} {
		if checkExchange(x) == nil {
			t.Errorf("%s is let through", what)
		}
	}
}
