//! Reasons why an STag cannot be used.

/// Reason why a local key cannot be used for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocalFault {
    /// The key does not exist, or belongs to another session, domain or QP.
    #[error("no such local key")]
    InvalidKey,
    /// The region does not allow local writes.
    #[error("the region may not be written")]
    NoRight,
    /// The range is not within the region.
    #[error("outside the region")]
    Bounds,
    /// The region is shared by the whole domain. An RC or UC QP cannot invalidate it.
    #[error("a region of the domain can only be deregistered")]
    OrdinaryRegion,
    /// The region cannot be invalidated while windows are bound to it.
    #[error("windows are bound to the region")]
    HasWindows,
}

/// Reason why a remote STag cannot be used for a message. The variants are in the order of the
/// checks in RFC 5041 section 7.1 and RFC 5040 section 7.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteFault {
    /// The STag does not exist, or is not enabled.
    #[error("invalid STag")]
    InvalidStag,
    /// The STag belongs to another domain, or is limited to another stream.
    #[error("STag not associated with this stream")]
    NotAssociated,
    /// The region lacks the remote right.
    #[error("access rights violation")]
    NoRight,
    /// The QP lacks the remote right, even if the region has it (`qp_access_flags`).
    #[error("operation not enabled for the queue pair")]
    NotEnabled,
    /// The offset plus the length is 2^64 or more.
    #[error("tagged offset wraps")]
    Wrap,
    /// The range is not within the region.
    #[error("base or bounds violation")]
    Bounds,
}

/// Reason why the peer cannot invalidate an STag (RFC 5040 section 5.3, codes 0/1/09 and 0/2/09).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidateFault {
    /// Unknown, or not associated with the stream: reported as a protection error.
    NotAssociated,
    /// Associated, but shared by the domain, or a region with bound windows: reported as an
    /// operation error.
    Shared,
}
