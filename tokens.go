// tokens.go knows who makes a request. A token is for one service, and what is kept of it stands beside
// that service's record: a hash, never the secret. In memory a token ends at once; the file follows, and
// then the event.
package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// tokenVerbs are what a token can allow.
var tokenVerbs = []string{"read", "deploy", "rollback"}

const (
	// tokenRequests is how many requests of one token may be under way at once.
	tokenRequests = 256
	// tokenDeployments is how many deployments of one token are accepted in an hour.
	tokenDeployments = 60
	// usedEvery is how often last uses are written.
	usedEvery = 5 * time.Minute
)

// errTokenEnded ends what a token began: it was revoked, or has expired.
var errTokenEnded = errors.New("the token has ended")

// tokenFile is tokens.json.
type tokenFile struct {
	Version int           `json:"version"`
	Service string        `json:"service"`
	Tokens  []tokenRecord `json:"tokens"` // oldest first
	Owed    []tokenEvent  `json:"events_owed"`
	SHA256  string        `json:"sha256"`
}

// tokenRecord is what is kept of a token.
type tokenRecord struct {
	ID        string     `json:"id"`
	Secret    string     `json:"secret_sha256"`
	Label     string     `json:"label"`
	Verbs     []string   `json:"verbs"`
	IssuedAt  time.Time  `json:"issued_at"`
	ExpiresAt *time.Time `json:"expires_at"`
	UsedAt    *time.Time `json:"last_used_at"` // within usedEvery
	RevokedAt *time.Time `json:"revoked_at"`
}

// tokenEvent is an event that the commit after this write is to carry.
type tokenEvent struct {
	Type  string `json:"type"`
	Token string `json:"token"`
	Actor string `json:"actor"`
}

// check holds what must be true of the record, after each read.
func (f *tokenFile) check(service string) error {
	seen := map[string]bool{}
	for _, t := range f.Tokens {
		sum, err := hex.DecodeString(t.Secret)
		if !tokenID.MatchString(t.ID) || seen[t.ID] || err != nil || len(sum) != sha256.Size {
			return fmt.Errorf("%w: token %q has no id, or one that is there twice, or no hash", errCorrupt, t.ID)
		}
		for _, v := range t.Verbs {
			if !slices.Contains(tokenVerbs, v) {
				return fmt.Errorf("%w: token %s has the unknown verb %q", errCorrupt, t.ID, v)
			}
		}
		seen[t.ID] = true
	}
	if f.Service != service {
		return fmt.Errorf("%w: it is of service %q", errCorrupt, f.Service)
	}
	return nil
}

// tokens reads tokens.json, or its predecessor; one that is not there has none.
func (d *dataDir) tokens(service, name string) (*tokenFile, error) {
	path := d.serviceFile(service, name)
	f := &tokenFile{}
	if err := readRecord(path, f); errors.Is(err, fs.ErrNotExist) {
		return &tokenFile{Version: recordVersion, Service: service}, nil
	} else if err != nil {
		return nil, err
	}
	if err := f.check(service); err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return f, nil
}

// token is a token in memory. What its record says of revocation and use is guarded by its service's mu.
type token struct {
	tokenRecord
	service  string
	hash     []byte
	ended    context.Context // done once it is revoked
	end      context.CancelFunc
	used     atomic.Int64  // Unix milliseconds
	slots    chan struct{} // one for each request under way
	accepted []time.Time   // its deployments of the last hour, guarded by its service's mu
}

func newToken(service string, rec tokenRecord) *token {
	t := &token{tokenRecord: rec, service: service, slots: make(chan struct{}, tokenRequests)}
	t.hash, _ = hex.DecodeString(rec.Secret)
	t.ended, t.end = context.WithCancel(context.Background())
	if rec.RevokedAt != nil {
		t.end()
	}
	return t
}

// valid tells whether the token allows anything now.
func (t *token) valid(now time.Time) bool {
	return t.ended.Err() == nil && (t.ExpiresAt == nil || now.Before(*t.ExpiresAt))
}

// recount takes up from the records, under mu, what was accepted for the tokens within the last hour: a
// restart of Toad gives none of them more.
func (s *service) recount(r *record) {
	ids, err := s.data.operationIDs(s.name)
	if err != nil {
		s.log.Warn("counting the deployments of the last hour", "err", err)
	}
	now, byToken := s.now(), map[string][]time.Time{}
	count := func(op *operation) {
		if now.Sub(op.CreatedAt) < time.Hour {
			byToken[op.RequestedBy] = append(byToken[op.RequestedBy], op.CreatedAt)
		}
	}
	for _, id := range ids { // newest first
		if now.Sub(idTime(id)) >= time.Hour {
			break
		}
		if op, err := s.data.operation(s.name, id); err == nil && (r.Operation == nil || r.Operation.ID != id) {
			count(op)
		}
	}
	if r.Operation != nil {
		count(r.Operation)
	}
	for _, t := range s.issued {
		if len(t.accepted) == 0 {
			t.accepted = byToken["token:"+t.ID]
			slices.SortFunc(t.accepted, time.Time.Compare)
		}
	}
}

// exhausted tells, under mu, how long no further deployment of the token is accepted; nil stands for a local
// caller, who has no bound.
func (s *service) exhausted(t *token) time.Duration {
	if t == nil {
		return 0
	}
	if !s.recounted { // not at the start, which many services wait for
		s.recount(s.rec.Load())
		s.recounted = true
	}
	return t.exhausted(s.now())
}

// exhausted tells how long no further deployment of the token is accepted.
func (t *token) exhausted(now time.Time) time.Duration {
	t.accepted = slices.DeleteFunc(t.accepted, func(at time.Time) bool { return now.Sub(at) >= time.Hour })
	if len(t.accepted) < tokenDeployments {
		return 0
	}
	return time.Hour - now.Sub(t.accepted[0])
}

var (
	tokenID   = regexp.MustCompile(`^[a-z2-7]{12}$`)
	tokenForm = regexp.MustCompile(`^(?i:bearer) +toad_([a-z2-7]{12})_([0-9a-f]{64})$`)
)

// tokenIndex finds every token by its id.
type tokenIndex struct{ sync.Map }

func (x *tokenIndex) get(id string) *token {
	v, _ := x.Load(id)
	t, _ := v.(*token)
	return t
}

// holder is the token whose secret a request shows, valid or not; nil if it shows none that was issued.
func (x *tokenIndex) holder(h http.Header) *token {
	shown := h.Values("Authorization")
	if len(shown) != 1 {
		return nil
	}
	m := tokenForm.FindStringSubmatch(shown[0])
	if m == nil {
		return nil
	}
	t, want := x.get(m[1]), make([]byte, sha256.Size)
	if t != nil {
		want = t.hash
	}
	if sum := sha256.Sum256([]byte(m[2])); subtle.ConstantTimeCompare(sum[:], want) != 1 {
		return nil
	}
	return t
}

// caller is who makes a request: whoever may use the administration socket (the zero value), or the
// holder of a token, who may know of one service only.
type caller struct {
	remote  bool     // it came over TCP
	token   string   // the id of the token that it showed; "" on the socket, and if it showed none that was issued
	service string   // the one service that the token is for
	verbs   []string // what it allows
}

func (c caller) local() bool { return !c.remote }

// actor is the caller as records and events name it.
func (c caller) actor() string {
	switch {
	case c.local():
		return "local"
	case c.token == "":
		return "unknown"
	}
	return "token:" + c.token
}

// may refuses what needs a verb that the caller does not have.
func (c caller) may(verb string) error {
	if c.local() || slices.Contains(c.verbs, verb) {
		return nil
	}
	e := refuse("forbidden", "this token does not allow %s", verb)
	e.Verb = verb
	return e
}

// callerKey is the caller's in a request's context.
type callerKey struct{}

func callerOf(r *http.Request) caller {
	c, _ := r.Context().Value(callerKey{}).(caller)
	return c
}

func unauthorized() *apiError {
	return refuse("unauthorized", "a valid token is needed: Authorization: Bearer toad_…")
}

// bearer is the token of an actor, nil if the actor is none. One that has ended is refused: whoever
// changes a record asks under its lock, so that nothing is accepted once a revocation was answered.
func (s *service) bearer(actor string) (*token, error) {
	id, ok := strings.CutPrefix(actor, "token:")
	if !ok {
		return nil, nil
	}
	t := s.index.get(id)
	if t == nil || !t.valid(s.now()) {
		return nil, unauthorized()
	}
	return t, nil
}

// readTokens takes up what tokens.json says, under mu. A token that ended in memory stays ended. With a
// file that is not to be trusted no token is added, and none is issued.
func (s *service) readTokens() {
	f, err := s.data.tokens(s.name, "tokens.json")
	if err == nil && len(f.Tokens) > 0 {
		err = syncFile(s.data.serviceFile(s.name, "tokens.json"))
	}
	if s.tokensErr = err; err != nil {
		s.alert("tokens-unavailable", "err", err)
		return
	}
	known := map[string]*token{}
	for _, t := range s.issued {
		known[t.ID] = t
	}
	owed := s.owed
	s.issued, s.owed, s.unsaved = nil, f.Owed, false
	for _, rec := range f.Tokens {
		t := known[rec.ID]
		delete(known, rec.ID)
		switch {
		case t == nil:
			t = newToken(s.name, rec)
		case rec.RevokedAt != nil:
			t.RevokedAt = rec.RevokedAt
			t.end()
		case t.RevokedAt != nil: // not written yet
			s.unsaved = true
			for _, e := range owed {
				if e.Type == "token-revoked" && e.Token == t.ID {
					s.owed = append(s.owed, e)
				}
			}
		}
		s.issued = append(s.issued, t)
		s.index.Store(t.ID, t)
	}
	for id, t := range known {
		t.end()
		s.index.Delete(id)
	}
}

// writeTokens makes what is known of the tokens durable, under mu.
func (s *service) writeTokens() error {
	f := &tokenFile{Version: recordVersion, Service: s.name, Tokens: []tokenRecord{}, Owed: append([]tokenEvent{}, s.owed...)}
	for _, t := range s.issued {
		f.Tokens = append(f.Tokens, t.tokenRecord)
	}
	if err := makeDir(s.data.serviceFile(s.name)); err != nil {
		return err
	}
	err := s.data.withReserve(func() error { return writeRecord(s.data.serviceFile(s.name, "tokens.json"), f) })
	if err == nil {
		s.unsaved = false
	}
	return err
}

// tellTokens commits the events that are owed, under mu. Nothing else is committed between the write that
// owes an event and the one that does not any more, so that an owed event of the last commit is told.
func (s *service) tellTokens() error {
	if s.tokensErr != nil || len(s.owed) == 0 {
		return nil
	}
	var events []event
	last := s.rec.Load().Events
	for _, o := range s.owed {
		if !slices.ContainsFunc(last, func(e event) bool { return e.Type == o.Type && e.Detail == o.Token }) {
			events = append(events, event{Type: o.Type, Actor: o.Actor, Detail: o.Token})
		}
	}
	if len(events) > 0 {
		if err := s.commitLocked(unchanged, events...); err != nil {
			return err
		}
	}
	s.owed = nil
	if err := s.writeTokens(); err != nil {
		s.broken = err // the file still owes them: nothing is committed before it was read again
		s.poke()
		return err
	}
	return nil
}

// issue makes a token. It is durable, and its event with it, when its secret is returned.
func (s *service) issue(actor, label string, verbs []string, expires time.Duration) (rec tokenRecord, secret string, err error) {
	if err := s.usable(); err != nil {
		return rec, "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := errors.Join(s.tokensErr, s.broken); err != nil {
		return rec, "", s.unavailable(err)
	}
	now := s.now()
	s.issued = slices.DeleteFunc(s.issued, func(t *token) bool { // long ended: the events tell of it
		old := t.RevokedAt != nil && now.Sub(*t.RevokedAt) > keepAge || t.ExpiresAt != nil && now.Sub(*t.ExpiresAt) > keepAge
		if old {
			s.index.Delete(t.ID)
		}
		return old
	})
	var b [32]byte
	rand.Read(b[:])
	secret = hex.EncodeToString(b[:])
	rec = tokenRecord{ID: strings.ToLower(rand.Text()[:12]), Secret: sumHex([]byte(secret)), Label: label, Verbs: slices.Clone(verbs), IssuedAt: now}
	if s.index.get(rec.ID) != nil {
		return rec, "", fmt.Errorf("the random id %s is taken", rec.ID)
	}
	if expires > 0 {
		rec.ExpiresAt = new(now.Add(expires))
	}
	t := newToken(s.name, rec)
	s.issued, s.owed = append(s.issued, t), append(s.owed, tokenEvent{"token-issued", rec.ID, actor})
	if err := s.writeTokens(); err != nil { // if it is on the disk after all, nobody has its secret
		s.issued, s.owed = s.issued[:len(s.issued)-1], s.owed[:len(s.owed)-1]
		return rec, "", s.unavailable(err)
	}
	if err := s.tellTokens(); err != nil {
		return rec, "", s.unavailable(err)
	}
	s.index.Store(rec.ID, t)
	return rec, "toad_" + rec.ID + "_" + secret, nil
}

// revoke ends tokens of this service, at once and also for what they began. It is durable when it returns
// nil, even if the records of the service cannot be used: the event comes when they can. After an error it
// is to be called again, and the tokens stay ended meanwhile.
func (s *service) revoke(actor string, which func(t *token) bool) error {
	s.index.Range(func(_, v any) bool { // before the lock: whoever has it may wait for a disk
		if t := v.(*token); t.service == s.name && which(t) {
			t.end()
		}
		return true
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tokensErr != nil {
		return s.tokensErr
	}
	now := s.now()
	for _, t := range s.issued {
		if which(t) && t.RevokedAt == nil {
			t.end()
			t.RevokedAt, s.unsaved = &now, true
			s.owed = append(s.owed, tokenEvent{"token-revoked", t.ID, actor})
		}
	}
	if s.unsaved {
		if err := s.writeTokens(); err != nil {
			return err
		}
	}
	s.tryTellTokens()
	return nil
}

// tryTellTokens commits what is owed if that can be done now; else it is when the records are read again.
func (s *service) tryTellTokens() {
	if s.rec.Load() == nil || s.broken != nil {
		return
	}
	if err := s.tellTokens(); err != nil {
		s.alert("token-event-owed", "err", err)
	}
}

// revokeAll ends every token of the service, as revoke does.
func (s *service) revokeAll(actor string) error {
	return s.revoke(actor, func(*token) bool { return true })
}

// saveUses writes when the tokens were last used. It is no source of truth: what cannot be written is
// tried the next time.
func (s *service) saveUses() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tokensErr != nil {
		return
	}
	changed := false
	for _, t := range s.issued {
		if ms := t.used.Load(); ms != 0 && (t.UsedAt == nil || ms > t.UsedAt.UnixMilli()) {
			t.UsedAt, changed = new(time.UnixMilli(ms).UTC()), true
		}
	}
	if changed {
		if err := s.writeTokens(); err != nil {
			s.log.Warn("writing last uses", "err", err)
		}
	}
}

// saveUsesUntil does so for every service, until ctx ends.
func (d *daemon) saveUsesUntil(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(usedEvery):
		}
		for _, s := range d.all() {
			s.saveUses()
		}
	}
}

// listTokens is what is known of the service's tokens, oldest first.
func (s *service) listTokens() []tokenRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []tokenRecord
	for _, t := range s.issued {
		rec := t.tokenRecord
		if ms := t.used.Load(); ms != 0 {
			rec.UsedAt = new(time.UnixMilli(ms).UTC())
		}
		list = append(list, rec)
	}
	return list
}

type tokenRequest struct {
	Service          string   `json:"service"`
	Label            string   `json:"label"`
	Verbs            []string `json:"verbs"`
	ExpiresInSeconds *int64   `json:"expires_in_seconds,omitempty"`
}

type wireToken struct {
	ID         string    `json:"id"`
	Service    string    `json:"service"`
	Label      string    `json:"label"`
	Verbs      []string  `json:"verbs"`
	Valid      bool      `json:"valid"`
	IssuedAt   wireTime  `json:"issued_at"`
	ExpiresAt  *wireTime `json:"expires_at"`
	LastUsedAt *wireTime `json:"last_used_at"`
	RevokedAt  *wireTime `json:"revoked_at"`
}

// wireIssued is the one answer that carries a secret.
type wireIssued struct {
	wireToken
	Token string `json:"token"`
}

type wireTokens struct {
	Tokens []wireToken `json:"tokens"`
}

func (d *daemon) wireToken(service string, t tokenRecord) wireToken {
	return wireToken{ID: t.ID, Service: service, Label: t.Label, Verbs: append([]string{}, t.Verbs...),
		Valid:    t.RevokedAt == nil && (t.ExpiresAt == nil || d.host.wall().Before(*t.ExpiresAt)),
		IssuedAt: wireTime(t.IssuedAt), ExpiresAt: wireTimeOf(t.ExpiresAt), LastUsedAt: wireTimeOf(t.UsedAt), RevokedAt: wireTimeOf(t.RevokedAt)}
}

// maxExpiry is the longest life of a token that ends by itself.
const maxExpiry = 10 * 365 * 24 * time.Hour

var labelForm = regexp.MustCompile(`^[ -~]{1,64}$`)

// check judges what is asked for, and returns how long the token lives; 0: it has no end.
func (req *tokenRequest) check() (time.Duration, error) {
	switch {
	case !serviceID.MatchString(req.Service):
		return 0, invalid("service", "service must be an identifier of lower-case letters, digits and -, at most 40 long")
	case !labelForm.MatchString(req.Label):
		return 0, invalid("label", "label must be 1 to 64 printable ASCII characters")
	case len(req.Verbs) == 0:
		return 0, invalid("verbs", "verbs must hold one of %s at least", strings.Join(tokenVerbs, ", "))
	}
	for i, v := range req.Verbs {
		if !slices.Contains(tokenVerbs, v) || slices.Contains(req.Verbs[:i], v) {
			return 0, invalid("verbs", "verbs must be of %s, each once", strings.Join(tokenVerbs, ", "))
		}
	}
	if n := req.ExpiresInSeconds; n != nil {
		if *n < 1 || *n > int64(maxExpiry/time.Second) {
			return 0, invalid("expires_in_seconds", "expires_in_seconds must be from 1 to %d", int64(maxExpiry/time.Second))
		}
		return time.Duration(*n) * time.Second, nil
	}
	return 0, nil
}

func (d *daemon) postToken(w http.ResponseWriter, r *http.Request) error {
	var req tokenRequest
	if err := decode(r, &req, "service", "label", "verbs", "expires_in_seconds?"); err != nil {
		return err
	}
	expires, err := req.check()
	if err != nil {
		return err
	}
	s, err := d.service(req.Service)
	if err != nil {
		return err
	}
	rec, secret, err := s.issue(callerOf(r).actor(), req.Label, req.Verbs, expires)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, wireIssued{d.wireToken(s.name, rec), secret})
}

func (d *daemon) getTokens(w http.ResponseWriter, r *http.Request) error {
	services := d.all()
	if name := r.FormValue("service"); name != "" {
		s, err := d.service(name)
		if err != nil {
			return err
		}
		services = []*service{s}
	}
	list := wireTokens{Tokens: []wireToken{}}
	for _, s := range services {
		for _, t := range s.listTokens() {
			list.Tokens = append(list.Tokens, d.wireToken(s.name, t))
		}
	}
	return writeJSON(w, http.StatusOK, list)
}

// deleteToken revokes. The answer waits until the revocation is durable; that is tried again until it is,
// also when nobody waits any more.
func (d *daemon) deleteToken(w http.ResponseWriter, r *http.Request) error {
	t := d.tokens.get(r.PathValue("id"))
	if t == nil {
		return refuse("not_found", "there is no such token")
	}
	s, err := d.service(t.service)
	if err != nil {
		return err
	}
	done, actor := make(chan struct{}), callerOf(r).actor()
	d.wg.Go(func() {
		for {
			err := s.revoke(actor, func(other *token) bool { return other.ID == t.ID })
			if err == nil {
				close(done)
				return
			}
			s.alert("token-revocation", "token", t.ID, "err", err)
			select {
			case <-d.ctx.Done():
				return
			case <-time.After(time.Second):
			}
		}
	})
	select {
	case <-done:
	case <-r.Context().Done():
		return r.Context().Err()
	case <-d.stopping:
		return refuse("shutting_down", "toad is shutting down, and the revocation may not be durable yet: revoke the token again")
	}
	for _, rec := range s.listTokens() {
		if rec.ID == t.ID {
			return writeJSON(w, http.StatusOK, d.wireToken(s.name, rec))
		}
	}
	return refuse("not_found", "there is no such token")
}
