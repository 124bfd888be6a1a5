//! Bytes of a Read's source that are read early.

use crate::device::memory::Target;
use crate::engine::requester::message::{Gather, Message, MessageSource};
use crate::stream::InboundRead;
use rnic_abi::types::SessionId;

/// The last bytes of the source of a Read, read when its request arrived.
pub(in crate::engine) struct EarlyBytes {
    pub read: InboundRead,
    /// Owner of the memory.
    pub owner: SessionId,
    /// Their offset in the response.
    pub from: usize,
    pub bytes: Vec<u8>,
}

impl EarlyBytes {
    /// Replaces memory of the next `len` bytes of a message by the bytes that were read early, if
    /// the message is the response to their Read.
    pub(in crate::engine) fn fill_in<'t>(
        &'t self,
        message: &Message,
        len: u32,
        memory: &mut Gather<'t>,
    ) {
        let MessageSource::ReadResponse(read) = &message.source else { return };
        let sent = message.sent as usize;
        let end = sent + len as usize;
        if *read != self.read || end <= self.from {
            return;
        }
        let &[target] = &memory[..] else { return };
        let start = self.from.max(sent);
        let bytes = self.bytes.get(start - self.from..end - self.from);
        if let (Some(before), Some(bytes)) = (target.part(0, start - sent), bytes) {
            memory.clear();
            memory.extend(Some(before).filter(|before| before.len() > 0));
            memory.push(Target::private(self.owner, bytes));
        }
    }
}
