package region_test

import (
	"errors"
	"fmt"
	"io"
	"net"
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

// Property: the slot of a key is the same in every version of this program, and in other languages;
// scope, operation and value keep their borders.
func TestSlotsAreFixedForEver(t *testing.T) {
	t.Parallel()
	for value, slot := range map[string]int{"a": 949, "0192f0c1-2b3c-7def-8123-456789abcdef": 928} {
		assert.Equal(t, slot, region.Slot(key(value)), value)
	}
	assert.NotEqual(t, region.Slot(idempotency.Key{Scope: "a", Operation: "bc", Value: "d"}), region.Slot(idempotency.Key{Scope: "ab", Operation: "c", Value: "d"}))
}

// Property: regions get about the same number of slots, whatever the order of their names, and a
// region that comes moves only what goes to it.
func TestSpreadMovesLittle(t *testing.T) {
	t.Parallel()
	two, three := region.Spread("eu", "us"), region.Spread("us", "ap", "eu")
	assert.Equal(t, three, region.Spread("eu", "us", "ap"))
	count := map[string]int{}
	for slot := range three {
		count[three[slot]]++
		if three[slot] != "ap" {
			assert.Equal(t, two[slot], three[slot], "slot %d", slot)
		}
	}
	for name, n := range count {
		assert.InDelta(t, region.SlotsMax/3, n, 80, name)
	}
}

// Property: a key keeps its home when a table is added, wherever and whenever it is looked up: also
// in a region that has the new table while another one does not. New keys follow the new table;
// keys without a time stay.
func TestKeysKeepTheirHomeWhenTablesChange(t *testing.T) {
	t.Parallel()
	moving := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	first := region.Table{Version: 1, Slots: region.Spread("eu", "us")}
	second := region.Table{Version: 2, From: moving, Slots: region.Spread("ap")}
	old, both := homes(t, first), homes(t, first, second)
	for i := range 200 {
		for _, k := range []idempotency.Key{
			keyOf(t, moving.Add(-time.Millisecond)), keyOf(t, moving.Add(-30*24*time.Hour)), key(idempotency.Domain("charge", fmt.Sprint(i))), key(uuid.NewString()),
		} {
			before, _ := old.Home(k)
			after, version := both.Home(k)
			require.Equal(t, before, after)
			require.Equal(t, 1, version)
		}
		after, version := both.Home(keyOf(t, moving))
		require.Equal(t, "ap", after)
		require.Equal(t, 2, version)
	}
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

// Property: a key has one home, and so one execution, whether a client sends it with quotes or
// without them, and wherever it lands.
func TestBothFormsOfAKeyHaveOneHome(t *testing.T) {
	t.Parallel()
	both := homes(t, region.Table{Version: 1, Slots: region.Spread("eu", "us")})
	us := newSite(t, both, "us", nil)
	address, err := url.Parse(us.URL)
	require.NoError(t, err)
	eu := newSite(t, both, "eu", map[string]*url.URL{"us": address})
	served := map[string]int{}
	for i := range 50 {
		value := fmt.Sprint("k", i)
		raw, quoted := eu.post(t, value), eu.post(t, `"`+value+`"`)
		require.Equal(t, []int{201, 201}, []int{raw.status, quoted.status})
		require.Equal(t, raw.header.Get("Served-By"), quoted.header.Get("Served-By"), value)
		served[raw.header.Get("Served-By")]++
	}
	require.Len(t, served, 2)
}

// Property: a process whose clock is wrong by hours, in either direction, serves keys that carry
// the time; only one from further ahead than AheadMax, which could be of a table that others do not
// have, is refused.
func TestWrongClocksRefuseNoKeys(t *testing.T) {
	t.Parallel()
	eu := newSite(t, all("eu"), "eu", nil)
	for _, by := range []time.Duration{-365 * 24 * time.Hour, -23 * time.Hour, 0, time.Hour, 23 * time.Hour} {
		require.Equal(t, 201, eu.post(t, keyOf(t, time.Now().Add(by)).Value).status, by)
	}
	served := len(eu.executed)
	got := eu.post(t, keyOf(t, time.Now().Add(25*time.Hour)).Value)
	require.Equal(t, 400, got.status)
	require.Contains(t, got.body, "more than 24h0m0s ahead")
	require.Len(t, eu.executed, served)
}

// Property: when the oldest table is dropped, no key of its time gets another home, where it would
// be executed again: it is refused, in every region. While the table is there it is served at home,
// however far its client's clock is behind.
func TestKeysOfADroppedTableAreRefused(t *testing.T) {
	t.Parallel()
	moved := time.Now().Add(-30 * 24 * time.Hour).Truncate(time.Millisecond)
	first := region.Table{Version: 1, Slots: region.Spread("eu")}
	second := region.Table{Version: 2, From: moved, Slots: region.Spread("us")}
	before, dropped := homes(t, first, second), homes(t, second)
	for _, made := range []time.Time{time.Unix(0, 0), moved.Add(-time.Hour), moved.Add(-time.Millisecond)} {
		k := keyOf(t, made).Value
		require.Equal(t, 201, newSite(t, before, "eu", nil).post(t, k).status)
		for _, name := range []string{"eu", "us"} {
			s := newSite(t, dropped, name, nil)
			got := s.post(t, k)
			require.Equal(t, 400, got.status, made)
			require.Contains(t, got.body, "is before "+moved.UTC().Format(time.RFC3339))
			require.Empty(t, s.executed)
		}
	}
	for _, made := range []time.Time{moved, time.Now()} {
		require.Equal(t, 201, newSite(t, dropped, "us", nil).post(t, keyOf(t, made).Value).status, made)
	}
	require.Equal(t, 201, newSite(t, dropped, "us", nil).post(t, "k").status, "without a time")
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

// Property: a forwarded request has the target that its client sent, whatever it contains, and so
// the same fingerprint as one that was sent to its home directly.
func TestForwardedTargetIsTheClients(t *testing.T) {
	t.Parallel()
	targets := []string{"/orders", "/orders?a=1&b=2", "/orders?a=1;b=2", "/orders?a=%zz&b=%2F", "/or%2Fders//x?;", "/orders?b=2&a=1&&=", "//orders?x=a%20b+c"}
	for name, root := range map[string]string{"no path": "", "a slash": "/"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var seen []string
			us := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { seen = append(seen, r.RequestURI) }))
			t.Cleanup(us.Close)
			address, err := url.Parse(us.URL + root)
			require.NoError(t, err)
			eu := newSite(t, all("us"), "eu", map[string]*url.URL{"us": address})
			for _, target := range targets {
				conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", eu.Listener.Addr().String())
				require.NoError(t, err)
				_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: eu\r\nIdempotency-Key: k\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", target)
				require.NoError(t, err)
				answer, err := io.ReadAll(conn)
				require.NoError(t, errors.Join(err, conn.Close()))
				require.Contains(t, string(answer), "200 OK")
			}
			require.Equal(t, targets, seen)
		})
	}
}
