//! Entries of requests: their assembly, their run, and their cancellation.
//!
//! Invariant: a request runs when its last fragment has arrived, once.

use super::super::packet::{Entry, EntryKind, PREFIX, all, extent, fragments};
use super::super::{KEPT_BYTES_MAX, newer};
use super::session::{Session, State};
use super::{Address, Host, Outcome, Request, RequestRef, Retired, Server};
use crate::mutants;
use farside_remote::fabric::ServiceId;

impl<A: Address, H: Host> Server<A, H> {
    pub(super) fn entry(&mut self, session: &mut Session<A, H::Session>, entry: &Entry<'_>, host: &mut H) {
        let is_greedy = self.pool.lent > self.config.lent_bytes && session.keeps_long_reply(entry.slot);
        let Some(slot) = session.slots.get_mut(entry.slot) else {
            self.counters.refused += 1;
            return;
        };
        let step = newer(entry.number, slot.number);
        let bit = 1 << entry.slot;
        if step < 0 {
            self.counters.stale += 1;
            return;
        }
        let is_idle = matches!(slot.state, State::Done | State::Acknowledged);
        if step > 1 || step == 1 && !is_idle {
            self.counters.refused += 1;
            return;
        }
        match (entry.kind, step) {
            (EntryKind::Chain | EntryKind::Call, 1) if is_greedy => {
                // The session keeps too much. The server tells the client that the request did not run, so that the
                // client need not wait.
                self.counters.refused += 1;
                slot.begin(entry.number, &mut self.pool);
                slot.void(&mut self.pool);
                session.send_have &= !bit;
                session.send_first(entry.slot);
            }
            (EntryKind::Chain | EntryKind::Call | EntryKind::Retire, 1) => {
                if entry.count > 1 && session.assembling + entry.size > self.config.assembly_bytes {
                    self.counters.refused += 1;
                    return;
                }
                self.begin(session, entry.slot);
                if entry.is_whole() {
                    self.run(session, entry.slot, entry.kind, entry.payload, host);
                } else {
                    let slot = &mut session.slots[entry.slot];
                    slot.state = State::Receiving;
                    slot.kind = entry.kind;
                    slot.size = entry.size;
                    slot.got = 0;
                    session.assembling += entry.size;
                    self.pool.fill(&mut slot.message, entry.size);
                    slot.message.resize(entry.size, 0);
                    self.fragment(session, entry, host);
                }
            }
            (EntryKind::Chain | EntryKind::Call | EntryKind::Retire, _) => match slot.state {
                State::Receiving => self.fragment(session, entry, host),
                State::Executing => {
                    self.counters.duplicates += 1;
                    session.send_have |= bit;
                }
                State::Done | State::Acknowledged
                    if mutants::DUPLICATE_RUNS_AGAIN.is_on() && entry.is_whole() =>
                {
                    self.run(session, entry.slot, entry.kind, entry.payload, host);
                }
                State::Done => {
                    self.counters.duplicates += 1;
                    session.send_first(entry.slot);
                }
                State::Acknowledged => self.counters.duplicates += 1,
            },
            (EntryKind::Cancel, _) => {
                match slot.state {
                    State::Executing => {
                        session.send_have |= bit;
                        return;
                    }
                    State::Receiving => {
                        session.assembling -= slot.size;
                        slot.void(&mut self.pool);
                    }
                    State::Done | State::Acknowledged if step == 1 => {
                        slot.begin(entry.number, &mut self.pool);
                        slot.void(&mut self.pool);
                    }
                    State::Done | State::Acknowledged => self.counters.duplicates += 1,
                }
                session.send_have &= !bit;
                session.send_first(entry.slot);
            }
            (EntryKind::Have, 0) => match slot.state {
                State::Receiving | State::Executing => session.send_have |= bit,
                State::Done => {
                    let count = fragments(PREFIX + slot.reply.len(), session.chunk);
                    let have = entry.have();
                    if have.have.get() == all(count) {
                        slot.state = State::Acknowledged;
                        slot.send = 0;
                        session.send_reply &= !bit;
                        self.pool.free(&mut slot.reply);
                    } else {
                        slot.send |= have.want.get() & all(count);
                        session.send_reply |= if slot.send == 0 { 0 } else { bit };
                    }
                }
                State::Acknowledged => self.counters.duplicates += 1,
            },
            (EntryKind::Have | EntryKind::Reply, _) => {
                self.counters.refused += 1;
            }
        }
    }

    /// Begins the slot's next request.
    #[inline]
    pub(super) fn begin(&mut self, session: &mut Session<A, H::Session>, index: usize) {
        let slot = &mut session.slots[index];
        slot.begin(slot.number.wrapping_add(1), &mut self.pool);
        session.send_reply &= !(1 << index);
        session.send_have &= !(1 << index);
    }

    /// Handles one fragment of a request that has several.
    fn fragment(&mut self, session: &mut Session<A, H::Session>, entry: &Entry<'_>, host: &mut H) {
        let slot = &mut session.slots[entry.slot];
        if slot.kind != entry.kind || slot.size != entry.size {
            self.counters.refused += 1;
            return;
        }
        session.send_have |= 1 << entry.slot;
        if slot.got & 1 << entry.index != 0 {
            self.counters.duplicates += 1;
            return;
        }
        slot.got |= 1 << entry.index;
        let (at, len) = extent(entry.size, session.chunk, entry.index);
        slot.message[at..at + len].copy_from_slice(entry.payload);
        if slot.got == all(entry.count) {
            session.assembling -= slot.size;
            session.send_have &= !(1 << entry.slot);
            let message = std::mem::take(&mut slot.message);
            self.run(session, entry.slot, entry.kind, &message, host);
            let slot = &mut session.slots[entry.slot];
            slot.message = message;
            self.pool.free(&mut slot.message);
        }
    }

    #[inline]
    pub(super) fn run(
        &mut self,
        session: &mut Session<A, H::Session>,
        index: usize,
        kind: EntryKind,
        message: &[u8],
        host: &mut H,
    ) {
        let request = match kind {
            EntryKind::Chain => Request::Chain(message),
            EntryKind::Call => {
                let (service, body) = message.split_at(PREFIX);
                let service = u32::from_le_bytes(service[..4].try_into().expect("a service has 4 bytes"));
                Request::Call(ServiceId(service), body)
            }
            EntryKind::Retire => Request::Retire(Retired(message)),
            kind => panic!("an entry of {kind:?} is not a request"),
        };
        let slot = &mut session.slots[index];
        let at = RequestRef { session: session.number, slot: index as u8, number: slot.number };
        session.executions += 1;
        slot.execution = session.executions;
        self.counters.executed += 1;
        // A chain's reply, and a call's response, are written where they are kept, as long as they are short.
        let has_long = match kind {
            EntryKind::Chain => &mut session.has_long_replies,
            _ => &mut session.has_long_responses,
        };
        let is_in_place = !*has_long;
        let mut reply = std::mem::take(if is_in_place { &mut slot.reply.own } else { &mut self.reply });
        let outcome = host.run(&mut session.host, at, request, &mut reply);
        if is_in_place && reply.capacity() <= KEPT_BYTES_MAX {
            slot.reply.own = reply;
        } else {
            *has_long |= is_in_place;
            self.pool.fill(&mut slot.reply, reply.len());
            slot.reply.extend_from_slice(&reply);
            reply.clear();
            if reply.capacity() > self.reply.capacity() {
                self.reply = reply;
            }
        }
        match outcome {
            Outcome::Done => session.done(index),
            Outcome::Later => {
                self.pool.free(&mut slot.reply);
                slot.state = State::Executing;
                // A HAVE tells the client that the request has arrived, so that it need not retransmit however long the
                // request runs.
                session.send_have |= 1 << index;
            }
        }
    }
}
