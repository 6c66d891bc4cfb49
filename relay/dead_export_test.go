package relay

// The statements on dead rows, for tests of their plans.
const (
	DeadSettingsSQL  = deadSettingsSQL
	DeadTopicsSQL    = deadTopicsSQL
	WaitingTopicsSQL = waitingTopicsSQL
	RetryTopicSQL    = retryTopicSQL
	ReleasedSQL      = releasedSQL
	ReleasableSQL    = releasableSQL
	HoldingSQL       = holdingSQL
	MoveToDeadSQL    = moveToDeadSQL
)

// HandBackMax is the limit of rows of a topic that are handed back at once.
const HandBackMax = handBackMax
