// Package kafkatest gives each test Kafka topics of its own.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) } // stops Kafka too
//
//	func TestRelay(t *testing.T) {
//		t.Parallel()
//		topic := kafkatest.Topic(t, 3)
//		client := kafkatest.Client(t, kgo.DefaultProduceTopic(topic))
//		...
//		records := kafkatest.ReadAll(t, topic)
//	}
//
// One cluster serves all tests of a process; package servers describes which. Functions whose names
// end in At use another one.
package kafkatest
