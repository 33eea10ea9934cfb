//! Execution: reads of keys, by a READ of a bucket of the index and a READ of the object, and claims of objects.
//!
//! A read is repeated while its object is locked, or torn: its lines have several versions, or are marked. A line has
//! 16 bits of its object's version. So a READ that takes so long that the object may be written 65,535 times counts as
//! torn.
//!
//! Invariant: what a read returns is the content of one version, which was current at an instant during the read.

use super::layout::{BUCKET_SIZE, BUCKET_SLOTS};
use super::object::{Content, Reading, decode};
use super::request::{Outcome, Request};
use super::site::Buffers;
use super::{Client, mutants};
use crate::members::all;
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::wire::{OPS_MAX, REPLY_BYTES_MAX};
use farside_remote::{Fabric, Out, read};
use std::time::Duration;
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

/// Pauses of a read that waits for another transaction: the first one, and their number. Each is twice as long as the
/// one before.
const PAUSE_FIRST: Duration = Duration::from_micros(2);
const PAUSES: u32 = 8;
/// Bytes of a reply for each READ, beside its output.
const REPLY_PER_READ: usize = 16;
/// Longest time of a READ whose lines have one version only if they are of one write. A write of an object takes two
/// calls, of at least 1 us each, so 65,535 writes take longer.
pub(super) const READ_TIME_MAX: Duration = Duration::from_millis(50);

/// An object of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// Index of the member.
    pub(super) shard: usize,
    /// Number of the object at the member.
    pub(super) object: u64,
}

/// What was found of a key.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// The key's object; `None` if the key has never had a value.
    pub(super) place: Option<Place>,
    /// Version of the object.
    pub(super) version: u64,
    /// Stamp of the transaction that has written the value, or deleted it.
    pub(super) stamp: u64,
    pub(super) value: Option<Vec<u8>>,
}

impl Seen {
    const NOTHING: Seen = Seen { place: None, version: 0, stamp: 0, value: None };
}

/// Whether a lookup wants the content of the key's object, or its place alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Content,
    Place,
}

/// A lookup of a key.
struct Pending<'k> {
    /// Place in the caller's list.
    index: usize,
    key: &'k [u8],
    /// Number of buckets of the probe path that were read.
    probed: u64,
    /// Objects to which the key may belong, as the bucket has them. The last one is next.
    candidates: Vec<u64>,
    /// Whether the bucket has a free slot, so that the key is in no later one.
    ends: bool,
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
            let pending = Pending { index, key, probed: 0, candidates: Vec::new(), ends: false };
            groups[self.site.places.place_of(key)].push(pending);
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
        let (mut own, mut seen, mut pauses) = (Buffers::default(), Vec::new(), 0);
        while !pending.is_empty() {
            self.read_buckets(shard, &mut pending, &mut own).await?;
            let (mut left, mut is_waiting) = (Vec::new(), false);
            let len = self.site.shards[shard].spec().object_len() as usize;
            let most = OPS_MAX.min(REPLY_BYTES_MAX / (len + REPLY_PER_READ)).max(1);
            let (unknown, known): (Vec<_>, Vec<_>) =
                pending.into_iter().partition(|of| of.candidates.is_empty());
            for of in unknown {
                match of.ends || of.probed == self.site.shards[shard].table.path_len() {
                    true => seen.push((of.index, Seen::NOTHING)),
                    false => left.push(of),
                }
            }
            let mut known = known.into_iter().peekable();
            while known.peek().is_some() {
                let group: Vec<Pending<'_>> = known.by_ref().take(most).collect();
                let found = self.read_objects(shard, group, wanted, &mut own, &mut seen).await?;
                is_waiting |= found.is_waiting;
                left.extend(found.left);
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
        Ok(seen)
    }

    /// Reads the next bucket of each key without a candidate.
    async fn read_buckets(
        &self,
        shard: usize,
        pending: &mut [Pending<'_>],
        own: &mut Buffers,
    ) -> Result<(), TxnError> {
        let shard = &self.site.shards[shard];
        let is_wanted = |of: &&mut Pending<'_>| {
            of.candidates.is_empty() && !of.ends && of.probed < shard.table.path_len()
        };
        let mut wanted: Vec<&mut Pending<'_>> = pending.iter_mut().filter(is_wanted).collect();
        for group in wanted.chunks_mut(OPS_MAX) {
            let mut chain = own.chain.begin(shard.key());
            let read_bucket = |of: &&mut Pending<'_>| {
                let at = shard.table.bucket(of.key, of.probed);
                chain.also(read(at, BUCKET_SIZE as u32))
            };
            let outs: Vec<Out<[u8]>> = group.iter().map(read_bucket).collect();
            self.site.fabric.run(shard.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
            for (of, out) in group.iter_mut().zip(outs) {
                let bucket = own.reply.get(out).map_err(TxnError::Refused)?;
                let bucket = <[U64; BUCKET_SLOTS as usize]>::ref_from_bytes(bucket);
                let bucket = bucket.map_err(|_| TxnError::Damaged("a short READ of the index"))?;
                let used = bucket.iter().take_while(|entry| **entry != U64::ZERO);
                of.candidates =
                    used.clone().filter_map(|entry| shard.table.object_of(of.key, entry.get())).collect();
                of.candidates.reverse();
                of.ends = used.count() < bucket.len();
                of.probed += 1;
            }
        }
        Ok(())
    }

    /// Reads the next candidate of each key of a group. Puts what was found into `seen`.
    async fn read_objects<'k>(
        &self,
        shard: usize,
        group: Vec<Pending<'k>>,
        wanted: Wanted,
        own: &mut Buffers,
        seen: &mut Vec<(usize, Seen)>,
    ) -> Result<Found<'k>, TxnError> {
        let (index, shard) = (shard, &self.site.shards[shard]);
        let len = shard.spec().object_len() as u32;
        let begun = self.site.fabric.now();
        let mut chain = own.chain.begin(shard.key());
        let next = |of: &Pending<'_>| *of.candidates.last().expect("it has a candidate");
        let outs: Vec<Out<[u8]>> =
            group.iter().map(|of| chain.also(read(shard.table.object(0, next(of)), len))).collect();
        self.site.fabric.run(shard.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
        let took = self.site.fabric.now().saturating_sub(begun);
        let is_slow = took > READ_TIME_MAX && !mutants::WRAP_ACCEPTED.is_on();
        let mut found = Found { left: Vec::new(), is_waiting: false };
        let mut content = Vec::new();
        for (mut of, out) in group.into_iter().zip(outs) {
            let object = own.reply.get(out).map_err(TxnError::Refused)?;
            let mut reading = decode(shard.spec().lines(), object, &mut content, true);
            if is_slow && matches!(reading, Reading::Whole(_)) {
                reading = Reading::Torn;
            }
            let version = match reading {
                Reading::Whole(version) => version,
                Reading::Locked(owner) => {
                    self.session.suspect(owner.client());
                    found.wait_for(of);
                    continue;
                }
                Reading::Torn => {
                    self.counters.torn.add();
                    found.wait_for(of);
                    continue;
                }
                Reading::Damaged => return Err(TxnError::Damaged("an object that no node writes")),
            };
            let damaged = TxnError::Damaged("a content of an object that no client writes");
            let content = Content::decode(&content).ok_or(damaged)?;
            if content.key != of.key {
                of.candidates.pop();
                found.left.push(of);
                continue;
            }
            let place = Some(Place { shard: index, object: next(&of) });
            let of_key = match wanted {
                Wanted::Place => Seen { place, ..Seen::NOTHING },
                Wanted::Content => {
                    Seen { place, version, stamp: content.stamp, value: content.value.map(<[u8]>::to_vec) }
                }
            };
            seen.push((of.index, of_key));
        }
        Ok(found)
    }

    /// Gives a key an object, unless it has one.
    ///
    /// # Errors
    /// [`TxnError`]; the key may have an object, and has no value by this call.
    pub(super) async fn claim(&self, key: &[u8]) -> Result<Place, TxnError> {
        let shard = self.site.places.place_of(key);
        let mut own = Buffers::default();
        let claimed = self.site.call(shard, &mut own, &Request::Claim { key }).await;
        let claimed = claimed.map_err(TxnError::of_read)?;
        match claimed.outcome {
            Outcome::Done if claimed.number < self.site.shards[shard].spec().objects => {
                self.counters.claims.add();
                Ok(Place { shard, object: claimed.number })
            }
            Outcome::TableFull => Err(TxnError::TableFull),
            _ => Err(TxnError::Damaged("an answer that no node gives to a claim")),
        }
    }
}

/// Keys that are to be read again.
struct Found<'k> {
    left: Vec<Pending<'k>>,
    /// Whether one of them is locked, or was torn.
    is_waiting: bool,
}

impl<'k> Found<'k> {
    fn wait_for(&mut self, of: Pending<'k>) {
        self.is_waiting = true;
        self.left.push(of);
    }
}
