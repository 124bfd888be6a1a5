//! Why an STag does not serve.

/// Why a local key does not serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocalFault {
    /// No such key, or it is another session's, domain's or QP's.
    #[error("no such local key")]
    InvalidKey,
    /// The region does not allow local writing.
    #[error("the region may not be written")]
    NoRight,
    /// The range leaves the region.
    #[error("outside the region")]
    Bounds,
    /// A region of the whole domain, which a request of an RC or UC QP does not invalidate.
    #[error("a region of the domain is only deregistered")]
    OrdinaryRegion,
    /// Windows are bound to the region that is to be invalidated.
    #[error("windows are bound to the region")]
    HasWindows,
}

/// Why a remote STag does not serve a message; the checks of RFC 5041 section 7.1 and RFC 5040
/// section 7.2, in the order in which they are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteFault {
    /// No such STag, or it is not enabled.
    #[error("invalid STag")]
    InvalidStag,
    /// Another domain's, or limited to another stream.
    #[error("STag not associated with this stream")]
    NotAssociated,
    /// The region lacks the remote right.
    #[error("access rights violation")]
    NoRight,
    /// The queue pair lacks it, whatever the region allows (`qp_access_flags`).
    #[error("operation not enabled for the queue pair")]
    NotEnabled,
    /// Offset plus length reaches 2^64.
    #[error("tagged offset wraps")]
    Wrap,
    /// The range leaves the region.
    #[error("base or bounds violation")]
    Bounds,
}

/// Why an STag cannot be invalidated by the peer (RFC 5040 section 5.3, codes 09 of both types).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidateFault {
    /// Unknown, or not associated with the stream: a protection error.
    NotAssociated,
    /// Associated, but shared by the domain, or a region with windows bound to it: an operation
    /// error.
    Shared,
}
