//! Execution: reads of keys, and the slots of keys.
//!
//! One chain takes the slots of several keys of a member, and the item of each. RC of a key is the C of its slot, and
//! not the timestamp in the item: an abort raises C only.
//!
//! A read waits while a transaction is between its prepare and its end on the key: the reading transaction could not
//! commit.

use super::layout::{ADDRESS_OFFSET, Item, ItemHeader, PROBES_MAX, Settled, Slot, Timestamp};
use super::site::Buffers;
use super::{Client, mutants};
use crate::members::all;
use crate::ready::run_until_ready;
use crate::txn::TxnError;
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::wire::{OPS_MAX, REPLY_BYTES_MAX};
use farside_remote::{Addr, ChainBuf, Fabric, Reply, Status, allocate, cas_from, read, read_as};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Scratch address of a slot's half `C|address`.
pub(super) const TMP: Addr = Addr::scratch(0);
/// Scratch address of the address in that half.
pub(super) const TMP_ADDRESS: Addr = Addr::scratch(ADDRESS_OFFSET as u64);
/// Scratch address of the address in a whole slot.
const TMP_SLOT_ADDRESS: Addr = Addr::scratch(24);

/// Pauses of a read that waits for another transaction: the first one, and their number. Each is twice as long as the
/// one before.
const PAUSE_FIRST: Duration = Duration::from_micros(2);
const PAUSES: u32 = 8;
/// Number of ops for each key of a chain that reads.
const OPS_PER_KEY: usize = 3;
/// Bytes of a reply for each key, beside the item.
const REPLY_PER_KEY: usize = size_of::<Slot>() + OPS_PER_KEY * 8;

/// Place of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// Index of the member.
    pub(super) shard: usize,
    /// Index of the slot at the member.
    pub(super) slot: u64,
}

/// What was found of a key.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// The key's slot; the first empty one on its probe path if it has none.
    pub(super) place: Place,
    /// Whether the slot is the key's.
    pub(super) has_slot: bool,
    /// RC: the C of the slot.
    pub(super) version: Timestamp,
    /// Timestamp of the transaction that has written the value, or deleted it.
    pub(super) written: Timestamp,
    pub(super) value: Option<Vec<u8>>,
    /// The highest of PW and PR.
    pub(super) prepared: Timestamp,
}

/// A key that is being looked up.
struct Pending<'k> {
    /// Place in the caller's list.
    index: usize,
    key: &'k [u8],
    /// Number of slots of the probe path that other keys have.
    probed: u64,
}

/// Whether a lookup waits until no transaction is between its prepare and its end on the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Settled,
    Any,
}

impl<F: Fabric + Clock> Client<F> {
    /// Reads keys, all at the same time.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    pub(super) async fn look_up(&self, keys: &[&[u8]], wanted: Wanted) -> Result<Vec<Seen>, TxnError> {
        self.site.fetch_keys().await?;
        let mut groups: Vec<Vec<Pending<'_>>> = self.site.shards.iter().map(|_| Vec::new()).collect();
        for (index, key) in keys.iter().enumerate() {
            groups[self.site.places.place_of(key)].push(Pending { index, key, probed: 0 });
        }
        let groups = groups.into_iter().enumerate().filter(|(_, group)| !group.is_empty());
        let found = all(groups.map(|(shard, group)| self.look_at(shard, group, wanted))).await;
        let mut seen: Vec<Option<Seen>> = keys.iter().map(|_| None).collect();
        for group in found {
            for (index, of_key) in group? {
                seen[index] = Some(of_key);
            }
        }
        Ok(seen.into_iter().flatten().collect())
    }

    /// Reads keys of one member.
    async fn look_at(
        &self,
        shard: usize,
        mut pending: Vec<Pending<'_>>,
        wanted: Wanted,
    ) -> Result<Vec<(usize, Seen)>, TxnError> {
        let table = &self.site.shards[shard];
        let item_max = table.spec().item_max();
        let most = (OPS_MAX / OPS_PER_KEY).min(REPLY_BYTES_MAX / (item_max + REPLY_PER_KEY)).max(1);
        let mut own = self.spare.borrow_mut().pop().unwrap_or_default();
        let Buffers { chain: buffer, reply } = &mut own;
        let (mut seen, mut pauses) = (Vec::with_capacity(pending.len()), 0);
        while !pending.is_empty() {
            let mut left = Vec::new();
            let mut is_waiting = false;
            for group in pending.chunks(most) {
                let mut chain = buffer.begin(table.key());
                let mut outs = Vec::with_capacity(group.len());
                for of in group {
                    let slot = table.slot(table.probe(of.key, of.probed));
                    chain.also(read_as::<Slot>(slot).redirect(TMP));
                    let item = read(TMP_SLOT_ADDRESS, item_max as u32).indirect();
                    outs.push(match mutants::VALUE_BEFORE_SLOT.is_on() {
                        false => (chain.also(read_as::<Slot>(TMP)), chain.then(item)),
                        true => {
                            let item = chain.then(item);
                            (chain.also(read_as::<Slot>(slot)), item)
                        }
                    });
                }
                self.site.fabric.run(table.node, &chain, reply).await.map_err(TxnError::of_read)?;
                for (of, (slot, item)) in group.iter().zip(outs) {
                    let slot = *reply.get(slot).map_err(TxnError::Refused)?;
                    let Pending { index, key, probed } = *of;
                    let number = table.probe(key, probed);
                    let item = match reply.status(item) {
                        Status::NullPointer => None,
                        Status::Ok => {
                            let bytes = reply.get(item).map_err(TxnError::Refused)?;
                            Some(Item::decode(bytes).ok_or(TxnError::Damaged("a slot without an item"))?)
                        }
                        status => return Err(TxnError::Refused(status)),
                    };
                    match item {
                        Some(item) if item.key != key => {
                            if probed + 1 == PROBES_MAX.min(table.spec().slots) {
                                return Err(TxnError::TableFull);
                            }
                            left.push(Pending { index, key, probed: probed + 1 });
                        }
                        Some(_) if wanted == Wanted::Settled && !slot.is_settled() => {
                            self.session.suspect(slot.prepared.pw.id());
                            is_waiting = true;
                            left.push(Pending { index, key, probed });
                        }
                        item => {
                            // The timestamps of an empty slot bind the key that claims it.
                            let of_key = Seen {
                                place: Place { shard, slot: number },
                                has_slot: item.is_some(),
                                version: match item {
                                    Some(item) if mutants::VERSION_OF_ITEM.is_on() => item.ts,
                                    _ => slot.settled.c,
                                },
                                written: item.map_or(Timestamp::ZERO, |item| item.ts),
                                value: item.and_then(|item| item.value).map(<[u8]>::to_vec),
                                prepared: slot.prepared.pw.max(slot.prepared.pr),
                            };
                            seen.push((index, of_key));
                        }
                    }
                }
            }
            if is_waiting {
                if pauses == PAUSES {
                    return Err(TxnError::Conflict);
                }
                self.counters.waits.add();
                self.site.fabric.sleep(PAUSE_FIRST * (1 << pauses)).await;
                pauses += 1;
            }
            pending = left;
        }
        self.spare.borrow_mut().push(own);
        Ok(seen)
    }

    /// Claims a slot for a key that has none. Returns the key's slot, as it is then.
    ///
    /// # Errors
    /// [`TxnError`]; the key may have a slot, and has no value.
    pub(super) async fn claim(&self, key: &[u8]) -> Result<Seen, TxnError> {
        let header = ItemHeader::new(Timestamp::ZERO, key, None);
        let list = Class::for_len(header.as_bytes().len() + key.len()).expect("a key is short").list();
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let shard = self.site.places.place_of(key);
        let table = &self.site.shards[shard];
        loop {
            let wanted = vec![Pending { index: 0, key, probed: 0 }];
            let found = self.look_at(shard, wanted, Wanted::Any).await?;
            let (_, seen) = found.into_iter().next().expect("one key was looked up");
            if seen.has_slot {
                return Ok(seen);
            }
            let mut chain = buffer.begin(table.key());
            chain.also(allocate(list, [header.as_bytes(), key, &[]]).redirect(TMP_ADDRESS));
            let slot = table.settled(seen.place.slot);
            let claimed = chain.then(cas_from(slot, &Settled::NONE, TMP).reclaiming(ADDRESS_OFFSET));
            let ran = run_until_ready(&*self.site.fabric, table.node, &chain, &mut reply).await;
            if !ran.map_err(TxnError::of_read)? {
                return Err(TxnError::OutOfMemory);
            }
            match reply.status(claimed) {
                // Read the slot in either case: it may have transactions already.
                Status::Ok | Status::CasFailed => self.counters.claims.add(),
                status => return Err(TxnError::Refused(status)),
            }
        }
    }
}
