//! Datagrams that a server receives.
//!
//! Invariant: no request of a datagram runs before the whole datagram is found valid.

use super::super::ones;
use super::super::packet::{self, Datagram, Entries, EntryKind, Kind, PacketError};
use super::{Address, End, Host, Request, Server};
use std::time::Duration;

impl<A: Address, H: Host> Server<A, H> {
    /// Handles a received datagram, and runs the requests that it completes.
    ///
    /// # Errors
    /// The datagram had no effect, for the returned reason, which may be logged. The counters include it.
    pub fn receive(&mut self, now: Duration, from: A, bytes: &[u8], host: &mut H) -> Result<(), PacketError> {
        self.counters.datagrams_in += 1;
        let result = self.take_in(now, from, bytes, host);
        match result {
            Ok(()) | Err(PacketError::Session(_)) => {}
            Err(PacketError::Secret) => self.counters.bad_secrets += 1,
            Err(_) => self.counters.malformed += 1,
        }
        result
    }

    fn take_in(&mut self, now: Duration, from: A, bytes: &[u8], host: &mut H) -> Result<(), PacketError> {
        let datagram = match Datagram::decode(bytes, self.config.is_reliable) {
            Err(PacketError::Version(version)) => {
                self.refuse_version(from, bytes);
                return Err(PacketError::Version(version));
            }
            datagram => datagram?,
        };
        match datagram.kind {
            Kind::Hello => return self.hello(now, from, &datagram, bytes.len(), host),
            Kind::Data | Kind::Ping | Kind::Bye => {}
            kind => return Err(PacketError::Kind(kind as u8)),
        }
        let Some(index) = self.index_of(datagram.session) else {
            return self.gone(from, &datagram);
        };
        let session = self.sessions[index].as_mut().expect("the index was just found");
        if !packet::same(session.secret, datagram.secret) {
            return Err(PacketError::Secret);
        }
        if session.address != from {
            self.counters.refused += 1;
            return Ok(());
        }
        match datagram.kind {
            Kind::Data => {
                let chains = &mut self.chains;
                let (mut begins, mut count) = (0_u64, 0);
                let entries = Entries::validate(datagram.body, session.chunk, |at, entry| {
                    count += 1;
                    if session.begins_chain(entry) {
                        begins |= 1 << entry.slot;
                        chains[entry.slot] = (at, at + entry.payload.len());
                    }
                })?;
                self.counters.entries_in += u64::from(count);
                session.heard = now;
                let mut session = self.sessions[index].take().expect("the index was just found");
                // A single chain would not profit from prefetching.
                if begins.count_ones() > 1 {
                    for slot in ones(begins) {
                        let (from, to) = self.chains[slot];
                        host.expect(&mut session.host, Request::Chain(&datagram.body[from..to]));
                    }
                    host.ready();
                }
                let has_others = begins.count_ones() != count;
                if has_others || self.pool.lent > self.config.lent_bytes {
                    for entry in entries {
                        self.entry(&mut session, &entry, host);
                    }
                } else {
                    for slot in ones(begins) {
                        self.begin(&mut session, slot);
                        let (from, to) = self.chains[slot];
                        self.run(&mut session, slot, EntryKind::Chain, &datagram.body[from..to], host);
                    }
                }
                self.sessions[index] = Some(session);
            }
            _ if !datagram.body.is_empty() => return Err(PacketError::Length),
            Kind::Ping => {
                session.heard = now;
                session.pong = true;
            }
            _ => {
                self.end(index, End::Said, host);
                return Ok(());
            }
        }
        self.mark_dirty(index);
        Ok(())
    }
}
