//! The error of a method call.

use std::fmt;

/// The error object of a JSON-RPC response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RpcError {
    /// A JSON-RPC error code, or a negated errno as in SPDK.
    pub code: i64,
    /// One sentence for the caller.
    pub message: String,
}

/// Codes of JSON-RPC 2.0 (section 5.1), and negated errno values of Linux.
impl RpcError {
    /// The request is not JSON, or exceeds a limit.
    pub const PARSE: i64 = -32700;
    /// The request is JSON, but not a JSON-RPC request.
    pub const INVALID_REQUEST: i64 = -32600;
    /// No method has that name.
    pub const METHOD_NOT_FOUND: i64 = -32601;
    /// A parameter is missing, unknown or has an invalid value.
    pub const INVALID_PARAMS: i64 = -32602;
    /// The method failed for a reason that has no code of its own.
    pub const INTERNAL: i64 = -32603;
    /// The method may not be called in the present stage. SPDK's value is -1 too.
    pub const INVALID_STATE: i64 = -1;
    /// Operation not permitted.
    pub const EPERM: i64 = -1;
    /// Input or output error.
    pub const EIO: i64 = -5;
    /// Out of memory.
    pub const ENOMEM: i64 = -12;
    /// Bad address: SPDK's code for a histogram that is not enabled.
    pub const EFAULT: i64 = -14;
    /// The object is in use.
    pub const EBUSY: i64 = -16;
    /// The name is in use.
    pub const EEXIST: i64 = -17;
    /// No object has that name.
    pub const ENODEV: i64 = -19;
    /// A value is invalid.
    pub const EINVAL: i64 = -22;
    /// A limit is reached.
    pub const ENOSPC: i64 = -28;
    /// The operation is not supported.
    pub const ENOTSUP: i64 = -95;
    /// The operation timed out.
    pub const ETIMEDOUT: i64 = -110;
    /// The object exists or the operation is in progress already.
    pub const EALREADY: i64 = -114;
    /// The change is made, and takes effect later.
    pub const EINPROGRESS: i64 = -115;
    /// The job was cancelled.
    pub const ECANCELED: i64 = -125;

    /// An error with any code.
    pub fn new(code: i64, message: impl Into<String>) -> RpcError {
        RpcError { code, message: message.into() }
    }

    /// [`INVALID_PARAMS`](Self::INVALID_PARAMS).
    pub fn invalid_params(message: impl fmt::Display) -> RpcError {
        RpcError::new(Self::INVALID_PARAMS, format!("Invalid parameters: {message}"))
    }

    /// [`INTERNAL`](Self::INTERNAL).
    pub fn internal(message: impl fmt::Display) -> RpcError {
        RpcError::new(Self::INTERNAL, message.to_string())
    }
}

impl fmt::Display for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.message, self.code)
    }
}

impl std::error::Error for RpcError {}

impl From<reactor::ReactorUnavailable> for RpcError {
    fn from(error: reactor::ReactorUnavailable) -> RpcError {
        RpcError::internal(error)
    }
}
