//! Faults that a simulation plants, to show that its checks find them.

/// An error that a replica makes on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlantedReplicaFault {
    /// A write is committed when the primary's log has it.
    AcknowledgeBeforeReplicas,
    /// A read returns entries that are not committed.
    DirtyRead,
    /// Entries are applied in place before they are committed.
    ApplyUncommitted,
    /// Messages of an earlier epoch are accepted.
    EpochUnchecked,
    /// A lease counts from the receipt of its acknowledgement instead of the sending of what it answers.
    LeaseFromReceipt,
    /// Recovery accepts an entry whose end was not written. The log's storage makes this error.
    TornTail,
    /// Log entries are freed when a checkpoint begins instead of when it is durable.
    FreeEarly,
    /// A request that is already applied is applied again.
    RetryTwice,
    /// The primary reads without leases.
    StalePrimary,
    /// Entries of other epochs with the same sequence pass for equal.
    SkipReconciliation,
    /// A write to the object that was copied last is withheld from the learner.
    CopyLimitOffByOne,
    /// Entries are sent between two parts of an object, those for the object without their data.
    CopyAdvancedInObject,
    /// The in-sync set shrinks before the map says so.
    ShrinkAfterAcknowledge,
    /// A learner is proposed for the in-sync set while commits do not wait for it.
    PromoteUnprepared,
    /// A repair replaces what was written after the other replica read.
    RepairOvertaken,
    /// Blocks that have the data of truncated entries are not settled.
    TruncateUnsettled,
    /// Recovery accepts an entry whose data is not in place. The storage makes this error.
    PlacedUnchecked,
    /// A read returns what an uncommitted entry wrote in place. The storage makes this error.
    PlacedReadEarly,
    /// Entries that are applied again after a crash replace what later ones wrote in place. The storage makes
    /// this error.
    RedoOverPlaced,
    /// A new primary serves at once, as if the earlier one had handed over.
    HandOverAssumed,
    /// A primary hands over to the preferred replica although that is a learner.
    TransferUnprepared,
    /// A restarted primary does not ask whether others have more: they truncate what it does not have.
    TruncateForOlderPrimary,
    /// A replica on an older copy of its device takes that for its device.
    IncarnationUnchecked,
    /// A replica does not compare its log with what is kept elsewhere.
    RecordUnchecked,
    /// Of more than two sessions one is forgotten, and a client that is not known counts as new.
    ForgetLiveSession,
    /// Writes at an earlier attach epoch are accepted.
    AttachUnfenced,
    /// A scrub compares what was written while members answered.
    ScrubOvertaken,
    /// What a member cannot read is replaced by what the primary read before a later write.
    ScrubRepairOvertaken,
}

impl PlantedReplicaFault {
    /// All.
    pub const ALL: [PlantedReplicaFault; 28] = [
        PlantedReplicaFault::AcknowledgeBeforeReplicas,
        PlantedReplicaFault::DirtyRead,
        PlantedReplicaFault::ApplyUncommitted,
        PlantedReplicaFault::EpochUnchecked,
        PlantedReplicaFault::LeaseFromReceipt,
        PlantedReplicaFault::TornTail,
        PlantedReplicaFault::FreeEarly,
        PlantedReplicaFault::RetryTwice,
        PlantedReplicaFault::StalePrimary,
        PlantedReplicaFault::SkipReconciliation,
        PlantedReplicaFault::CopyLimitOffByOne,
        PlantedReplicaFault::CopyAdvancedInObject,
        PlantedReplicaFault::ShrinkAfterAcknowledge,
        PlantedReplicaFault::PromoteUnprepared,
        PlantedReplicaFault::RepairOvertaken,
        PlantedReplicaFault::TruncateUnsettled,
        PlantedReplicaFault::PlacedUnchecked,
        PlantedReplicaFault::PlacedReadEarly,
        PlantedReplicaFault::RedoOverPlaced,
        PlantedReplicaFault::HandOverAssumed,
        PlantedReplicaFault::TransferUnprepared,
        PlantedReplicaFault::TruncateForOlderPrimary,
        PlantedReplicaFault::IncarnationUnchecked,
        PlantedReplicaFault::RecordUnchecked,
        PlantedReplicaFault::ForgetLiveSession,
        PlantedReplicaFault::AttachUnfenced,
        PlantedReplicaFault::ScrubOvertaken,
        PlantedReplicaFault::ScrubRepairOvertaken,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            PlantedReplicaFault::AcknowledgeBeforeReplicas => "acknowledge-before-replicas",
            PlantedReplicaFault::DirtyRead => "dirty-read",
            PlantedReplicaFault::ApplyUncommitted => "apply-uncommitted",
            PlantedReplicaFault::EpochUnchecked => "epoch-unchecked",
            PlantedReplicaFault::LeaseFromReceipt => "lease-from-receipt",
            PlantedReplicaFault::TornTail => "torn-tail",
            PlantedReplicaFault::FreeEarly => "free-early",
            PlantedReplicaFault::RetryTwice => "retry-twice",
            PlantedReplicaFault::StalePrimary => "stale-primary",
            PlantedReplicaFault::SkipReconciliation => "skip-reconciliation",
            PlantedReplicaFault::CopyLimitOffByOne => "copy-limit-off-by-one",
            PlantedReplicaFault::CopyAdvancedInObject => "copy-advanced-in-object",
            PlantedReplicaFault::ShrinkAfterAcknowledge => "shrink-after-acknowledge",
            PlantedReplicaFault::PromoteUnprepared => "promote-unprepared",
            PlantedReplicaFault::RepairOvertaken => "repair-overtaken",
            PlantedReplicaFault::TruncateUnsettled => "truncate-unsettled",
            PlantedReplicaFault::PlacedUnchecked => "placed-unchecked",
            PlantedReplicaFault::PlacedReadEarly => "placed-read-early",
            PlantedReplicaFault::RedoOverPlaced => "redo-over-placed",
            PlantedReplicaFault::HandOverAssumed => "hand-over-assumed",
            PlantedReplicaFault::TransferUnprepared => "transfer-unprepared",
            PlantedReplicaFault::TruncateForOlderPrimary => "truncate-for-older-primary",
            PlantedReplicaFault::IncarnationUnchecked => "incarnation-unchecked",
            PlantedReplicaFault::RecordUnchecked => "record-unchecked",
            PlantedReplicaFault::ForgetLiveSession => "forget-live-session",
            PlantedReplicaFault::AttachUnfenced => "attach-unfenced",
            PlantedReplicaFault::ScrubOvertaken => "scrub-overtaken",
            PlantedReplicaFault::ScrubRepairOvertaken => "scrub-repair-overtaken",
        }
    }
}

/// Which faults a replica has. It is a parameter of the type, so that a program without faults has no code
/// for them.
pub trait Plants: Copy {
    /// Whether it makes this error.
    fn has(self, fault: PlantedReplicaFault) -> bool;
}

/// No faults: the product.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFaults;

impl Plants for NoFaults {
    fn has(self, _fault: PlantedReplicaFault) -> bool {
        false
    }
}

/// At most one fault: the simulation.
impl Plants for Option<PlantedReplicaFault> {
    fn has(self, fault: PlantedReplicaFault) -> bool {
        self == Some(fault)
    }
}
