package kafkaclient_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkaclient"
)

// Property: clients can be made of the same options at the same time. Only the race detector sees a
// break.
func TestClientsOfTheSameOptions(t *testing.T) {
	t.Parallel()
	opts := []kgo.Opt{kgo.ProducerBatchCompression(kgo.ZstdCompression(), kgo.NoCompression())}
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			client, err := kafkaclient.New(opts...)
			if assert.NoError(t, err) {
				client.Close()
			}
		})
	}
	all.Wait()
}
