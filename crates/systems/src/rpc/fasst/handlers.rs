//! Handlers: what a node does with the requests of a packet.
//!
//! Invariant: a packet is decoded whole before its first request runs. A malformed packet changes nothing.

use super::packet::{self, ENTRIES_MAX, Entries, Header, PACKET_MAX};
use farside_remote::Memory;
use farside_remote::service::Locks;

/// Status of a request that its handler has refused. The payload is the reason.
pub const REFUSED: u8 = 255;
/// Status of a packet whose coordinator has another epoch. No request of the packet was handled.
pub const STALE: u8 = 254;

/// Result of a handler: the status of its response, or the reason why it has done nothing.
pub type Handled<W> = Result<Result<u8, String>, W>;

/// Function that handles a request.
type Run<S, M> = fn(&S, &M, &Header, &[u8], &mut Vec<u8>) -> Handled<<M as Memory>::Wait>;
/// Function that decides about a packet.
type Admits<S, M> = fn(&S, &M, &Header, &[u8]) -> Result<bool, <M as Memory>::Wait>;

/// Handler of one type of requests. It runs to its end, and waits for nothing but memory.
#[derive(Debug)]
pub struct Handler<S, M: Memory> {
    /// Whether the handler changes the store.
    pub changes: bool,
    /// Returns the locks that the handler needs, as a function of the request.
    pub locks: fn(&S, &Header, &[u8]) -> Locks,
    /// Handles a request, and appends the payload of its response.
    pub run: Run<S, M>,
}

/// The handlers of a service, and its rule for epochs.
#[derive(Debug)]
pub struct Handlers<S, M: Memory> {
    /// Returns the handler of a type of requests, if there is one.
    pub of: fn(u8) -> Option<Handler<S, M>>,
    /// Whether a packet with requests of these types is handled: it has the epoch that counts for its coordinator.
    pub admits: Admits<S, M>,
}

impl<S, M: Memory> Handlers<S, M> {
    /// Returns the locks that the requests of a packet need together.
    pub fn locks(&self, state: &S, packet: &[u8]) -> Locks {
        let Ok((header, mut entries)) = self.find(packet) else { return Locks::NONE };
        entries
            .try_fold(Locks::NONE, |locks, entry| {
                let handler = (self.of)(entry.kind)?;
                Some(locks.and((handler.locks)(state, &header, entry.payload)))
            })
            .unwrap_or(Locks::NONE)
    }

    /// Whether a request of the packet changes the store.
    pub fn changes(&self, packet: &[u8]) -> bool {
        let changes = |kind| (self.of)(kind).is_some_and(|handler| handler.changes);
        self.find(packet).is_ok_and(|(_, mut entries)| entries.any(|entry| changes(entry.kind)))
    }

    /// Handles the requests of a packet in their order, and appends the packet of responses to `answer`.
    ///
    /// # Errors
    /// The outer error is a wait of memory. The inner error is the reason why the packet was refused.
    pub fn serve(
        &self,
        state: &S,
        memory: &M,
        packet: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        let Some((header, entries)) = packet::decode(packet, false) else { return Ok(Err(malformed())) };
        let mut kinds = [0; ENTRIES_MAX];
        let mut handlers = [const { None }; ENTRIES_MAX];
        let mut count = 0;
        for (entry, (kind, handler)) in entries.clone().zip(kinds.iter_mut().zip(&mut handlers)) {
            *handler = (self.of)(entry.kind);
            if handler.is_none() {
                return Ok(Err(unknown()));
            }
            *kind = entry.kind;
            count += 1;
        }
        let from = answer.len();
        packet::begin(&header, true, answer);
        if !(self.admits)(state, memory, &header, &kinds[..count])? {
            return packet::append(answer, from, (STALE, 0), |_| Ok(None)).map(Ok);
        }
        for (entry, handler) in entries.zip(handlers.iter().flatten()) {
            packet::append(answer, from, (REFUSED, entry.index), |out| {
                let payload = out.len();
                let handled = (handler.run)(state, memory, &header, entry.payload, out)?;
                Ok(Some(match handled {
                    Ok(status) => status,
                    Err(reason) => {
                        out.truncate(payload);
                        out.extend_from_slice(reason.as_bytes());
                        REFUSED
                    }
                }))
            })?;
        }
        let is_possible = answer.len() - from <= PACKET_MAX;
        Ok(if is_possible {
            Ok(())
        } else {
            Err("the responses do not fit into one packet: send fewer requests".into())
        })
    }

    /// Decodes a packet of requests. Each of them has a handler.
    fn find<'a>(&self, packet: &'a [u8]) -> Result<(Header, Entries<'a>), String> {
        let (header, entries) = packet::decode(packet, false).ok_or_else(malformed)?;
        let are_known = entries.clone().all(|entry| (self.of)(entry.kind).is_some());
        if are_known { Ok((header, entries)) } else { Err(unknown()) }
    }
}

#[cold]
fn malformed() -> String {
    "the packet is malformed: use the same release on both sides".into()
}

#[cold]
fn unknown() -> String {
    "the packet has an unknown type of requests: use the same release on both sides".into()
}
