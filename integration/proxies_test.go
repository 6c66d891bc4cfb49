package integration_test

import (
	"net"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"go.uber.org/goleak"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/proxies"
)

// newProxies puts proxies, and a distance, between a process and its servers.
func newProxies(t *testing.T, database string) *proxies.Set {
	t.Helper()
	var addresses []string
	brokers, err := kadm.NewClient(kafkatest.Client(t)).ListBrokers(t.Context())
	require.NoError(t, err)
	for _, b := range brokers {
		addresses = append(addresses, net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port))))
	}
	p, err := proxies.New(database, addresses, proxies.Distance)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// leftByProxies are goroutines for bytes to peers that were killed: Toxiproxy never ends them.
func leftByProxies() []goleak.Option {
	const module = "github.com/Shopify/toxiproxy/v2"
	return []goleak.Option{
		goleak.IgnoreAnyFunction(module + ".(*ToxicLink).read"),
		goleak.IgnoreAnyFunction(module + ".(*ToxicLink).write"),
		goleak.IgnoreAnyFunction(module + "/toxics.(*ToxicStub).Run"),
		goleak.IgnoreAnyFunction(module + "/toxics.(*ToxicStub).InterruptToxic"),
	}
}
