//go:build unix

package demo_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
)

// kfake keeps a member that dies while its join request waits, with its share of the partitions and
// without a session timer. The run still finishes.
func TestRunOutlivesAMemberThatKfakeKeeps(t *testing.T) {
	longtest.Only(t, "the demo")
	t.Parallel()
	options := short(t)
	options.Brokers, options.Fake = kafkatest.Fake(t).ListenAddrs(), true
	joined := false
	options.Progress = func(p demo.Progress) {
		if !joined && p.Phase == "waiting for the last effects" {
			joined = true
			joinAndDie(t, options.Brokers)
		}
	}
	report, err := demo.Run(t.Context(), options)
	require.NoError(t, err)
	assert.True(t, joined)
	assert.True(t, report.Held(), "%+v", report)
}

// joinAndDie joins the only group, when it is stable, and disconnects while the others rejoin. If
// the answer comes before that, since they rejoin anyway, it leaves and tries again.
func joinAndDie(t *testing.T, brokers []string) {
	t.Helper()
	admin := kadm.NewClient(kafkatest.ClientAt(t, brokers))
	for range 100 {
		var group kadm.DescribedGroup
		require.Eventually(t, func() bool {
			groups, err := admin.DescribeGroups(t.Context())
			require.NoError(t, err)
			group = groups.Sorted()[0]
			return group.State == "Stable" && len(group.Members) == 3
		}, 2*time.Minute, 50*time.Millisecond)
		if diesJoining(t, brokers, group) {
			return
		}
	}
	require.Fail(t, "no request to join was ever waiting")
}

// diesJoining reports whether the client was gone before its request to join was answered.
func diesJoining(t *testing.T, brokers []string, group kadm.DescribedGroup) bool {
	t.Helper()
	request := kmsg.NewPtrJoinGroupRequest()
	request.Group, request.ProtocolType = group.Group, group.ProtocolType
	request.SessionTimeoutMillis, request.RebalanceTimeoutMillis = 2000, 1000
	protocol := kmsg.NewJoinGroupRequestProtocol()
	metadata := kmsg.NewConsumerMemberMetadata()
	metadata.Version, metadata.Topics = 1, []string{group.Group} // the topic has the same name
	protocol.Name, protocol.Metadata = group.Protocol, metadata.AppendTo(nil)
	request.Protocols = append(request.Protocols, protocol)

	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	require.NoError(t, err)
	defer client.Close()
	answer, err := request.RequestWith(t.Context(), client)
	require.NoError(t, err)
	require.Equal(t, kerr.MemberIDRequired.Code, answer.ErrorCode)
	request.MemberID = answer.MemberID
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err = request.RequestWith(ctx, client); err != nil {
		require.ErrorIs(t, err, context.DeadlineExceeded)
		return true
	}
	leave := kmsg.NewPtrLeaveGroupRequest()
	leave.Group, leave.MemberID = group.Group, request.MemberID
	member := kmsg.NewLeaveGroupRequestMember()
	member.MemberID = request.MemberID
	leave.Members = append(leave.Members, member)
	_, err = leave.RequestWith(t.Context(), client)
	require.NoError(t, err)
	return false
}
