package region_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/region"
)

func key(value string) idempotency.Key {
	return idempotency.Key{Scope: "tenant", Operation: "order", Value: value}
}

// keyOf has a UUIDv7 of a time.
func keyOf(t *testing.T, made time.Time) idempotency.Key {
	t.Helper()
	id, err := uuid.NewV7()
	require.NoError(t, err)
	for i := range 6 {
		id[i] = byte(made.UnixMilli() >> (40 - 8*i))
	}
	return key(id.String())
}

func homes(t *testing.T, tables ...region.Table) *region.Homes {
	t.Helper()
	h, err := region.New(tables...)
	require.NoError(t, err)
	return h
}

// Property: all problems of tables and settings are reported at once.
func TestWrongSettingsAreRefused(t *testing.T) {
	t.Parallel()
	_, err := region.New()
	require.ErrorContains(t, err, "no table")
	slots := region.Spread("eu")
	slots[3] = "a b"
	now := time.Now()
	_, err = region.New(region.Table{Version: 2, From: now, Slots: region.Spread("eu")[1:]}, region.Table{Version: 2, From: now, Slots: slots})
	for _, text := range []string{"table 0 has 1023 slots", "table 1 has version 2", "table 1 holds from", "slot 3: region \"a b\""} {
		require.ErrorContains(t, err, text)
	}
	_, err = homes(t, region.Table{Version: 1, Slots: region.Spread("eu")}).Middleware(region.Config{
		AheadMax: time.Millisecond, Forward: map[string]*url.URL{
			"us": {Scheme: "ftp", Host: "us"}, "ap": {Scheme: "https", Host: "ap", Path: "/api/"}, "sa": {Scheme: "https", Host: "sa", RawQuery: "token=canary"},
			"af": {Scheme: "https", Host: "af", Path: "/"},
		},
	})
	for _, text := range []string{
		"AheadMax 1ms", "Here", "Key nil", "Forward to \"us\"", "Forward to \"ap\" with path \"/api/\": want an address without a path", "Forward to \"sa\" with a query: want",
	} {
		require.ErrorContains(t, err, text)
	}
	require.NotContains(t, err.Error(), "canary")
	require.NotContains(t, err.Error(), `"af"`)
}

// site is a region's server. It counts what it executes.
type site struct {
	*httptest.Server

	name     string
	executed []string
}

func newSite(t *testing.T, h *region.Homes, name string, forward map[string]*url.URL) *site {
	t.Helper()
	s := &site{name: name}
	route, err := h.Middleware(region.Config{Here: name, Forward: forward, Transport: &http.Transport{DisableKeepAlives: true}, Key: func(r *http.Request) (idempotency.Key, bool) {
		value, err := httpkey.ParseKey(r.Header)
		return key(value), err == nil
	}})
	require.NoError(t, err)
	s.Server = httptest.NewServer(route(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.executed = append(s.executed, r.Header.Get("Idempotency-Key"))
		w.Header().Set("Served-By", name)
		w.WriteHeader(http.StatusCreated)
	})))
	t.Cleanup(s.Close)
	return s
}

// answer is what a client sees.
type answer struct {
	status int
	header http.Header
	body   string
}

func (s *site) post(t *testing.T, value string) answer {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/orders", strings.NewReader("body"))
	require.NoError(t, err)
	r.Header.Set("Idempotency-Key", value)
	response, err := s.Client().Do(r)
	require.NoError(t, err)
	defer func() { require.NoError(t, response.Body.Close()) }()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return answer{response.StatusCode, response.Header, string(body)}
}

func all(name string) *region.Homes {
	h, err := region.New(region.Table{Version: 1, Slots: region.Spread(name)})
	if err != nil {
		panic(err)
	}
	return h
}

// Property: a request that arrives elsewhere is executed at home or nowhere; the refusal names the
// home.
func TestRequestsAreServedAtHome(t *testing.T) {
	t.Parallel()
	us := newSite(t, all("us"), "us", nil)
	address, err := url.Parse(us.URL)
	require.NoError(t, err)
	for name, forward := range map[string]map[string]*url.URL{"refused": nil, "forwarded": {"us": address}} {
		eu := newSite(t, all("us"), "eu", forward)
		got := eu.post(t, "k-"+name)
		assert.Empty(t, eu.executed)
		if forward != nil {
			assert.Equal(t, 201, got.status, got.body)
			assert.Equal(t, "us", got.header.Get("Served-By"))
			continue
		}
		assert.Equal(t, 421, got.status)
		assert.Equal(t, "us", got.header.Get(region.HomeHeader))
		assert.Equal(t, "application/problem+json", got.header.Get("Content-Type"))
		assert.Contains(t, got.body, `"home":"us"`)
		got = eu.post(t, "")
		assert.Equal(t, 201, got.status, "no key: served where it lands")
	}
	assert.Equal(t, []string{"k-forwarded"}, us.executed)
}

// Property: two regions whose tables name each other forward a request once, not in a loop, and
// execute it nowhere.
func TestForwardingDoesNotCircle(t *testing.T) {
	t.Parallel()
	var eu *site
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { eu.Config.Handler.ServeHTTP(w, r) }))
	t.Cleanup(front.Close)
	back, err := url.Parse(front.URL)
	require.NoError(t, err)
	us := newSite(t, all("eu"), "us", map[string]*url.URL{"eu": back})
	there, err := url.Parse(us.URL)
	require.NoError(t, err)
	eu = newSite(t, all("us"), "eu", map[string]*url.URL{"us": there})
	got := eu.post(t, "k")
	assert.Equal(t, 421, got.status)
	assert.Contains(t, got.body, "forwarded already")
	assert.Empty(t, eu.executed)
	assert.Empty(t, us.executed)

	us.Close()
	got = eu.post(t, "k")
	assert.Equal(t, 502, got.status)
	assert.Contains(t, got.body, "try again with the same key")
}

// Property: a key keeps its home when a table is added, by the time that it carries; keys without a
// time stay. When the oldest table is dropped, a key of its time is refused, and so is one from
// further ahead than AheadMax, which could be of a table that others do not have.
func TestKeysKeepTheirHomeWhenTablesChange(t *testing.T) {
	t.Parallel()
	moving := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	first := region.Table{Version: 1, Slots: region.Spread("eu")}
	second := region.Table{Version: 2, From: moving, Slots: region.Spread("us")}
	require.Equal(t, region.Spread("eu", "us"), region.Spread("us", "eu"))
	both, dropped := homes(t, first, second), homes(t, second)
	early, late := keyOf(t, moving.Add(-time.Millisecond)), keyOf(t, moving)
	for k, home := range map[idempotency.Key]string{early: "eu", late: "us", key("k"): "eu"} {
		got, version := both.Home(k)
		require.Equal(t, home, got)
		require.Equal(t, map[string]int{"eu": 1, "us": 2}[home], version)
	}
	require.Equal(t, 201, newSite(t, both, "eu", nil).post(t, early.Value).status)
	us := newSite(t, dropped, "us", nil)
	require.Equal(t, 201, us.post(t, late.Value).status)
	for text, k := range map[string]idempotency.Key{"is before " + moving.UTC().Format(time.RFC3339): early, "more than 24h0m0s ahead": keyOf(t, moving.Add(25*time.Hour))} {
		got := us.post(t, k.Value)
		require.Equal(t, 400, got.status)
		require.Contains(t, got.body, text)
	}
	require.Len(t, us.executed, 1)
}
