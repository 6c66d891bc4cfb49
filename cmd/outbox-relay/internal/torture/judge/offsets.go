package judge

import "slices"

// rewinds judges that a group whose offset was set back in Kafka read from there again.
func (j *judgement) rewinds() {
	for _, order := range j.e.Rewinds {
		first, found := j.firstFrom(order)
		if !found {
			continue
		}
		if !slices.ContainsFunc(j.e.Resumes, func(r Resume) bool {
			return r.Group == order.Group && r.Topic == order.Topic && r.Partition == order.Partition && r.At > order.At && r.Offset <= first
		}) {
			j.v.blame(&j.v.Lost, "the offset of %s was set back to %d of %s/%d, and it never read offset %d again", order.Group, order.Offset, order.Topic, order.Partition, first)
		}
	}
}

// firstFrom returns the offset of the first record that a rewind repeats.
func (j *judgement) firstFrom(order Resume) (first int64, found bool) {
	for _, r := range j.e.Records {
		if r.Topic == order.Topic && r.Partition == order.Partition && r.Offset >= order.Offset && (!found || r.Offset < first) {
			first, found = r.Offset, true
		}
	}
	return first, found
}

// several is the place of an order that is in more than one partition.
const several = int32(-1)

// place notes in which partition the orders are, of topics that got more partitions: there, the order
// per key holds among the records of one partition only.
func (j *judgement) place() {
	j.places = map[string]map[int64]int32{}
	for topic := range j.e.Grown {
		j.places[topic] = map[int64]int32{}
	}
	for _, r := range j.e.Records {
		places, grown := j.places[r.Topic]
		if !grown || r.Unreadable != "" {
			continue
		}
		if known, ok := places[r.Body.Order]; ok && known != r.Partition {
			places[r.Body.Order] = several
		} else {
			places[r.Body.Order] = r.Partition
		}
	}
}

// lane is what the order per key holds within: the partitions of topics that grew. The order of what
// is in several of them is not judged.
type lane struct{ orders, children int32 }

// lane returns that of an order in topics, the second of which may be empty.
func (j *judgement) lane(order int64, children string) (l lane, judged bool) {
	l = lane{j.places[j.e.Topic][order], j.places[children][order]}
	return l, l.orders != several && l.children != several
}

// lanes are the last versions of each lane.
type lanes map[lane]lastVersions

func (l lanes) of(which lane) lastVersions {
	if l[which] == nil {
		l[which] = lastVersions{}
	}
	return l[which]
}
