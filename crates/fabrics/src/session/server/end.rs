//! The ends of sessions, and what the server remembers of ended sessions.
//!
//! Invariant: no request of a session runs after its end.

use super::super::packet::{self, Datagram, Kind, LastBytes, PacketError};
use super::session::Slot;
use super::{Address, End, Host, Server};
use std::time::Duration;
use zerocopy::IntoBytes;

/// The record of an ended session.
pub(super) struct Tombstone {
    pub(super) number: u32,
    pub(super) secret: u64,
    pub(super) identity: u128,
    pub(super) incarnation: u64,
    pub(super) slots: Box<[LastBytes]>,
    pub(super) is_fenced: bool,
}

/// States of a slot's last request in a tombstone.
pub(in crate::session) mod last {
    /// The request did not run, and never will.
    pub(crate) const NO: u32 = 0;
    /// Flag: the request ran.
    pub(crate) const RAN: u32 = 1;
    /// The request was running when the session ended.
    pub(crate) const RUNNING: u32 = 2;
}

impl<A: Address, H: Host> Server<A, H> {
    /// Ends sessions that were silent for too long. Call it several times per silence period.
    pub fn expire(&mut self, now: Duration, host: &mut H) {
        for index in 0..self.sessions.len() {
            let Some(session) = &mut self.sessions[index] else { continue };
            if now.saturating_sub(session.heard) >= self.config.silence {
                self.end(index, End::Silent, host);
            }
        }
    }

    /// Ends the sessions of this address, whose carrier is closed. Nothing more is sent there.
    pub fn hang_up(&mut self, address: A, host: &mut H) {
        self.outside.retain(|(to, _)| *to != address);
        for index in 0..self.sessions.len() {
            if self.sessions[index].as_ref().is_some_and(|session| session.address == address) {
                self.end(index, End::Broken, host);
            }
        }
    }

    /// Ends the sessions for which `is_chosen` returns true, such as those of a revoked token, for the reason `end`.
    /// `is_chosen` may change the host's data of the sessions that stay.
    pub fn end_where(&mut self, host: &mut H, end: End, mut is_chosen: impl FnMut(&mut H::Session) -> bool) {
        for index in 0..self.sessions.len() {
            if self.sessions[index].as_mut().is_some_and(|session| is_chosen(&mut session.host)) {
                self.end(index, end, host);
            }
        }
    }

    /// Sends GONE to a peer that has no session. If the ended session is remembered, the GONE also says which requests
    /// have run.
    pub(super) fn gone(&mut self, to: A, datagram: &Datagram<'_>) -> Result<(), PacketError> {
        let tombstone = self.tombstones.iter().find(|tombstone| tombstone.number == datagram.session);
        let (slots, is_fenced): (&[LastBytes], bool) = match tombstone {
            Some(tombstone) if !packet::same(tombstone.secret, datagram.secret) => {
                return Err(PacketError::Secret);
            }
            Some(tombstone) => (&tombstone.slots, tombstone.is_fenced),
            // A peer that has not proved that it knows the secret gets no more bytes than it sent.
            None => (&[], false),
        };
        // The response contains the secret that the sender used, which proves to the sender that the response is no
        // forgery.
        let bytes = gone_bytes(datagram.session, datagram.secret, slots, is_fenced);
        self.send_outside(to, bytes);
        Err(PacketError::Session(datagram.session))
    }

    pub(super) fn end(&mut self, index: usize, end: End, host: &mut H) {
        let mut session = self.sessions[index].take().expect("a session to end");
        self.by_identity.remove(&session.identity);
        self.counters.ended += 1;
        self.dirty.retain(|&dirty| usize::from(dirty) != index);
        for slot in &mut session.slots {
            self.pool.free(&mut slot.message);
            self.pool.free(&mut slot.reply);
        }
        let slots: Box<[LastBytes]> = session.slots.iter().map(Slot::last).collect();
        // The client does not expect this end. It learns of it from this GONE or, if the GONE is lost, in response to
        // its next datagram.
        let is_fenced = end == End::Fenced;
        if matches!(end, End::Silent | End::Replaced | End::Revoked | End::Fenced) {
            let bytes = gone_bytes(session.number, session.secret, &slots, is_fenced);
            self.send_outside(session.address, bytes);
        }
        if self.tombstones.len() == self.config.tombstones_max {
            self.tombstones.pop_front();
        }
        if self.config.tombstones_max > 0 {
            self.tombstones.push_back(Tombstone {
                number: session.number,
                secret: session.secret,
                identity: session.identity,
                incarnation: session.incarnation,
                slots,
                is_fenced,
            });
        }
        host.close(session.host, end);
    }
}

/// Returns a GONE datagram whose checksum is still missing.
fn gone_bytes(session: u32, secret: u64, slots: &[LastBytes], is_fenced: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    packet::begin(&mut bytes, Kind::Gone, session, secret);
    if !slots.is_empty() {
        bytes.extend_from_slice(&(slots.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&u32::from(is_fenced).to_le_bytes());
        bytes.extend_from_slice(slots.as_bytes());
    }
    bytes
}
