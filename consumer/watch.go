package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
)

// watchEvery is how often a session looks whether the group's partitions are in work. What it finds counts
// when it finds it twice in a row.
const watchEvery = 5 * time.Second

// errNotInWork: the group assigned a partition to this member, and the client never delivered it.
var errNotInWork = errors.New("the group assigned partitions that never came into work: joining anew")

// watch is the way out of a group that is stable and stands still all the same: with a partition that
// belongs to no member (a cooperative rebalance that was not followed by the next), or that belongs to this
// member by the broker's account and not by the client's. Neither heals by itself. A broker that does not
// describe the group (no right to, or the newer group protocol, where the broker assigns) is left alone.
func (s *session) watch(ctx context.Context) {
	admin := kadm.NewClient(s.client)
	orphaned, idle := 0, 0
	for {
		pause(ctx, watchEvery)
		if ctx.Err() != nil {
			return
		}
		group, topics, err := s.describe(ctx, admin)
		if err != nil || group.State != "Stable" {
			orphaned, idle = 0, 0
			continue
		}
		orphaned = strike(orphaned, s.orphans(group, topics))
		idle = strike(idle, s.notInWork(group))
		if orphaned >= 2 {
			s.cfg.Logger.WarnContext(ctx, "partitions belong to no member of the stable group: asking for a rebalance", "group", s.cfg.Group)
			s.client.ForceRebalance()
			orphaned = 0
		}
		if idle >= 2 {
			s.restart(errNotInWork)
			return
		}
	}
}

func strike(count int, found bool) int {
	if found {
		return count + 1
	}
	return 0
}

func (s *session) describe(ctx context.Context, admin *kadm.Client) (kadm.DescribedGroup, kadm.TopicDetails, error) {
	ctx, cancel := context.WithTimeout(ctx, watchEvery)
	defer cancel()
	groups, err := admin.DescribeGroups(ctx, s.cfg.Group)
	if err == nil {
		err = groups.Error()
	}
	if err != nil {
		return kadm.DescribedGroup{}, nil, fmt.Errorf("describe group: %w", err)
	}
	topics, err := admin.ListTopics(ctx, s.cfg.Topics...)
	return groups[s.cfg.Group], topics, err
}

// orphans tells whether a partition of the topics is assigned to nobody.
func (s *session) orphans(group kadm.DescribedGroup, topics kadm.TopicDetails) bool {
	assigned := group.AssignedPartitions()
	for _, topic := range topics {
		for number := range topic.Partitions {
			if topic.Err == nil && !assigned.Lookup(topic.Topic, number) {
				return true
			}
		}
	}
	return false
}

// notInWork tells whether the broker counts a partition as this member's that no worker has.
func (s *session) notInWork(group kadm.DescribedGroup) bool {
	if s.taking.Load() > 0 {
		return false // it says itself what it waits for
	}
	self, _ := s.client.GroupMetadata()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, member := range group.Members {
		assigned, ok := member.Assigned.AsConsumer()
		if member.MemberID != self || !ok {
			continue
		}
		for _, topic := range assigned.Topics {
			for _, number := range topic.Partitions {
				if s.partitions[topicPartition{topic.Topic, number}] == nil {
					return true
				}
			}
		}
	}
	return false
}
