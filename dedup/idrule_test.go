package dedup_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: the text of a rule is the rule.
func TestRuleForIDsIsItsText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"standard": "", "standard+debezium": "", "standard+watermill": "", "standard+debezium+watermill": "",
		"standard+watermill+debezium": "standard+debezium+watermill",
		"headers:":                    "", "headers:a": "", "headers:message-id,ce_id,x+y": "",
		"headers:" + strings.Repeat("n", dedup.IDHeaderBytesMax): "",
	} {
		if want == "" {
			want = text
		}
		rule, err := dedup.ParseIDRule(text)
		require.NoError(t, err, text)
		require.Equal(t, want, rule.String())
		again, err := dedup.ParseIDRule(rule.String())
		require.NoError(t, err)
		require.Equal(t, rule, again)
		require.True(t, rule.SameIDs(again))
	}
	standard, err := dedup.StandardIDs()
	require.NoError(t, err)
	require.Equal(t, "standard", dedup.IDRule{}.String())
	require.Equal(t, standard.Sources(), dedup.IDRule{}.Sources())
	vouched, err := dedup.StandardIDs(dedup.ProfileWatermill)
	require.NoError(t, err)
	require.False(t, standard.SameIDs(vouched))
}

// Property: an invalid rule is refused: an unknown form must not be taken for another.
func TestWhatIsNoRuleForIDsIsRefused(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"", "Standard", "standard ", "standard+", "standard+debezium+debezium", "debezium", "legacy", "headers", "headers:,", "headers:a,",
		"headers:a b", "headers:ü", "headers:a\x00", "headers:" + strings.Repeat("n", 256), "headers:" + strings.Repeat("a,", 20) + "a",
		"headers:" + strings.Repeat(strings.Repeat("n", 255)+",", 8) + "n",
	} {
		_, err := dedup.ParseIDRule(text)
		require.ErrorIs(t, err, dedup.ErrIDRule, "%q", text)
	}
	_, err := dedup.HeaderIDs("a,b")
	require.ErrorIs(t, err, dedup.ErrIDRule)
}

func FuzzIDRule(f *testing.F) {
	for _, text := range []string{"standard", "standard+debezium+watermill", "headers:", "headers:a,b", "headers:a,,b", "standard++"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		rule, err := dedup.ParseIDRule(text)
		if err != nil {
			require.ErrorIs(t, err, dedup.ErrIDRule)
			require.Less(t, len(err.Error()), 2000)
			return
		}
		require.LessOrEqual(t, len(rule.String()), dedup.IDRuleBytesMax)
		require.LessOrEqual(t, len(rule.Sources()), dedup.IDHeadersMax)
		again, err := dedup.ParseIDRule(rule.String())
		require.NoError(t, err)
		require.Equal(t, rule, again)
		if strings.HasPrefix(text, "headers:") {
			require.Equal(t, text, rule.String())
		}
		for _, source := range rule.Sources() {
			require.NotEmpty(t, source.Header)
			require.NotContains(t, source.Header, ",")
		}
	})
}

// Property: the first registration of a name decides its rule for IDs; later ones get that rule.
func TestNameKeepsItsRuleForIDs(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	rule := func(text string) dedup.IDRule {
		rule, err := dedup.ParseIDRule(text)
		require.NoError(t, err)
		return rule
	}
	register := func(name, wanted string) string {
		t.Helper()
		consumer, err := claims.Register(t.Context(), pool, dedup.Registration{Name: name, Group: "g", IDRule: rule(wanted)})
		require.NoError(t, err)
		var stored string
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT id_rule FROM effectonce.consumers WHERE name = $1`, name).Scan(&stored))
		require.Equal(t, stored, consumer.IDRule().String())
		return stored
	}
	assert.Equal(t, "standard+debezium", register("new", "standard+debezium"))
	assert.Equal(t, "standard+debezium", register("new", "headers:a"))
	var unset dedup.Consumer
	unset, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "unset", Group: "g"})
	require.NoError(t, err)
	assert.Equal(t, "standard", unset.IDRule().String())

	_, err = pool.Exec(t.Context(), `UPDATE effectonce.consumers SET id_rule = 'of 2030' WHERE name = 'unset'`)
	require.NoError(t, err)
	_, err = claims.Register(t.Context(), pool, dedup.Registration{Name: "unset", Group: "g"})
	require.ErrorIs(t, err, dedup.ErrIDRule)
}
