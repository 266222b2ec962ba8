//! Values of fields.

use codec::DecodeError;

macro_rules! codes {
    (
        $(#[$meta:meta])*
        $name:ident: $repr:ty, $what:literal at $at:literal { $($(#[$vmeta:meta])* $variant:ident = $value:literal,)* }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr($repr)]
        pub enum $name { $($(#[$vmeta])* $variant = $value,)* }

        impl From<$name> for $repr {
            fn from(code: $name) -> $repr {
                code as $repr
            }
        }

        impl TryFrom<$repr> for $name {
            type Error = DecodeError;

            fn try_from(value: $repr) -> Result<$name, DecodeError> {
                match value {
                    $($value => Ok($name::$variant),)*
                    _ => Err(DecodeError::value($what, $at, value.into())),
                }
            }
        }
    };
}

codes! {
    /// A stage of the login phase (section 11.12.3).
    LoginStage: u8, "login stage" at 1 {
        /// Security negotiation.
        Security = 0,
        /// Negotiation of operational parameters.
        Operational = 1,
        /// The full feature phase.
        FullFeature = 3,
    }
}

codes! {
    /// Class and detail of a login response (section 11.13.5).
    LoginStatus: u16, "login status" at 36 {
        /// The login goes on, or has succeeded.
        Success = 0x0000,
        /// The target is at the address in `TargetAddress` for now.
        MovedTemporarily = 0x0101,
        /// The target is at the address in `TargetAddress` from now on.
        MovedPermanently = 0x0102,
        /// An error of the initiator without a status of its own.
        InitiatorError = 0x0200,
        /// The initiator's identity could not be established.
        AuthenticationFailed = 0x0201,
        /// The initiator may not use the target.
        Forbidden = 0x0202,
        /// There is no such target here.
        NotFound = 0x0203,
        /// The target was removed and has no new address.
        TargetRemoved = 0x0204,
        /// The version is not supported.
        UnsupportedVersion = 0x0205,
        /// Too many connections in the session.
        TooManyConnections = 0x0206,
        /// A required key is missing.
        MissingParameter = 0x0207,
        /// The session cannot include this connection.
        CannotIncludeInSession = 0x0208,
        /// The session's type is not supported.
        UnsupportedSessionType = 0x0209,
        /// There is no session with this identifier.
        NoSession = 0x020a,
        /// The request is invalid in this state of the login.
        InvalidRequest = 0x020b,
        /// An error of the target without a status of its own.
        TargetError = 0x0300,
        /// The target is not operational.
        ServiceUnavailable = 0x0301,
        /// The target lacks a resource.
        OutOfResources = 0x0302,
    }
}

codes! {
    /// Why a PDU is rejected (section 11.17.1).
    RejectReason: u8, "reject reason" at 2 {
        /// The data digest does not match.
        DataDigestError = 0x02,
        /// A SNACK is rejected.
        SnackReject = 0x03,
        /// A violation of the protocol.
        ProtocolError = 0x04,
        /// The command is not supported.
        CommandNotSupported = 0x05,
        /// Too many immediate commands.
        ImmediateCommandReject = 0x06,
        /// The task is in progress.
        TaskInProgress = 0x07,
        /// The acknowledgement names no data.
        InvalidDataAck = 0x08,
        /// A field of the PDU is invalid.
        InvalidPduField = 0x09,
        /// A target transfer tag cannot be assigned.
        LongOperationReject = 0x0a,
        /// The negotiation is reset.
        NegotiationReset = 0x0b,
        /// The initiator should log out.
        WaitingForLogout = 0x0c,
    }
}

codes! {
    /// A task management function (section 11.5.1).
    TaskFunction: u8, "task management function" at 1 {
        /// Abort one task.
        AbortTask = 1,
        /// Abort the tasks of this nexus.
        AbortTaskSet = 2,
        /// Clear an auto contingent allegiance.
        ClearAca = 3,
        /// Abort the tasks of all nexuses.
        ClearTaskSet = 4,
        /// Reset a logical unit.
        LogicalUnitReset = 5,
        /// Reset the target.
        TargetWarmReset = 6,
        /// Reset the target and end its sessions.
        TargetColdReset = 7,
        /// Move a task to this connection.
        TaskReassign = 8,
    }
}

codes! {
    /// The outcome of a task management function (section 11.6.1).
    TaskResponse: u8, "task management response" at 2 {
        /// The function is complete.
        Complete = 0,
        /// There is no such task.
        NoTask = 1,
        /// There is no such logical unit.
        NoUnit = 2,
        /// The task still belongs to another connection.
        StillAllegiant = 3,
        /// Tasks cannot be reassigned.
        ReassignmentNotSupported = 4,
        /// The function is not supported.
        NotSupported = 5,
        /// The initiator may not use the function.
        NotAuthorized = 6,
        /// The function is rejected.
        Rejected = 255,
    }
}

codes! {
    /// Whether a command was executed (section 11.4.3).
    ScsiServiceResponse: u8, "SCSI response" at 2 {
        /// It was, and has a status.
        Completed = 0,
        /// The target failed.
        TargetFailure = 1,
    }
}

codes! {
    /// What a logout ends (section 11.14.1).
    LogoutReason: u8, "logout reason" at 1 {
        /// The session.
        CloseSession = 0,
        /// One connection.
        CloseConnection = 1,
        /// One connection, to recover its tasks on another.
        RemoveForRecovery = 2,
    }
}

codes! {
    /// The outcome of a logout (section 11.15.1).
    LogoutResponse: u8, "logout response" at 2 {
        /// The connection or session is closed.
        Closed = 0,
        /// There is no such connection in the session.
        NoConnection = 1,
        /// Recovery is not supported.
        RecoveryNotSupported = 2,
        /// The cleanup has failed.
        CleanupFailed = 3,
    }
}

codes! {
    /// An event that the target reports (section 11.9.1).
    AsyncEvent: u8, "asynchronous event" at 36 {
        /// Sense data of a logical unit.
        ScsiEvent = 0,
        /// The target requests a logout within `parameter3` seconds.
        LogoutRequested = 1,
        /// The target drops a connection.
        ConnectionDropped = 2,
        /// The target drops all connections of the session.
        SessionDropped = 3,
        /// The target requests a negotiation of parameters.
        NegotiationRequested = 4,
        /// The tasks of a nexus are being terminated.
        TasksTerminated = 5,
    }
}
