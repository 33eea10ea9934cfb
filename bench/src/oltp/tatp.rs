//! TATP: subscribers of a telephone network, as FaSST's public code has it (`app/tatp`).
//!
//! ```text
//! key                  | table u8 | type u8 | start time u8 | 0 u8 | subscriber u32 |    big-endian
//! key of a number      | table u8 | 14 decimal digits of 4 bits |
//! subscriber           | number, 15 ASCII digits | hex, 5 bytes | bytes, 2 bytes | changes u64 | bits u16 | msc u32 |
//!                      | vlr u32 |
//! secondary subscriber | subscriber u32 | mark u8 | 0, 3 bytes |
//! access info          | mark u8 | data, 9 bytes | 0, 6 bytes |
//! special facility     | is active u8 | error control u8 | data a u8 | mark u8 | changes u32 |
//! call forwarding      | end time u8 | mark u8 | number, 14 bytes |
//! ```
//! A unit is a subscriber. Its total is the number of changes of its subscriber row and of its facilities, and 2^32 for
//! each of its call forwardings. The changes are counted in bytes that no transaction of TATP writes, and are
//! little-endian.
//!
//! As in the paper's code, the call forwarding table is loaded in its steady state: each row of a facility exists with
//! probability 1/2, where TATP loads 0 to 3 rows. A transaction looks for one facility, where TATP scans all of a
//! subscriber.
//!
//! Differs from the paper's code: end times are 1 to 24 everywhere, as in TATP. Inserts of the code draw 0 to 23.

use farside_systems::txn::Txn;

use super::{Added, Benchmark, Outcome, Stop, below, of_mix, present, row};
use crate::driver::Kinds;
use crate::workload::{self, Random};

/// TATP with this number of subscribers.
#[derive(Clone, Copy, Debug)]
pub struct Tatp {
    subscribers: u64,
    /// Number of subscribers among which transactions draw.
    drawn: u64,
}

impl Tatp {
    /// Number of subscribers of each machine in the paper's runs.
    pub const SUBSCRIBERS: u64 = 1_000_000;
    /// Largest number of subscribers: their numbers have 9 digits.
    pub const SUBSCRIBERS_MAX: u64 = 1_000_000_000;

    /// Creates the benchmark.
    ///
    /// # Errors
    /// There are too many subscribers, or none.
    pub fn new(subscribers: u64) -> Result<Tatp, String> {
        if !(1..=Tatp::SUBSCRIBERS_MAX).contains(&subscribers) {
            return Err(format!(
                "tatp has 1 to {} subscribers, not {subscribers}: give other --records",
                Tatp::SUBSCRIBERS_MAX
            ));
        }
        Ok(Tatp { subscribers, drawn: subscribers })
    }

    /// Creates the benchmark with fewer subscribers than those among which transactions draw, for a model with less
    /// memory: each one stands for several, so none is hotter than it would be among all.
    ///
    /// # Errors
    /// There are too many subscribers, or none.
    pub fn folded(subscribers: u64, drawn: u64) -> Result<Tatp, String> {
        Ok(Tatp { drawn: drawn.max(subscribers), ..Tatp::new(subscribers)? })
    }

    /// Draws a subscriber, with TATP's distribution that is not uniform.
    fn subscriber(&self, random: &mut Random) -> u32 {
        let mask: u64 = match self.drawn {
            0..=1_000_000 => 65_535,
            1_000_001..=10_000_000 => 1_048_575,
            _ => 2_097_151,
        };
        let drawn = below(self.drawn, random) | below(mask + 1, random);
        // There are at most SUBSCRIBERS_MAX.
        (drawn % self.drawn % self.subscribers) as u32
    }
}

/// Shares of the kinds in percent, in the order of `KINDS`.
const MIX: [u64; 7] = [35, 35, 10, 2, 14, 2, 2];
const GET_SUBSCRIBER_DATA: usize = 0;
const GET_ACCESS_DATA: usize = 1;
const GET_NEW_DESTINATION: usize = 2;
const UPDATE_SUBSCRIBER_DATA: usize = 3;
const UPDATE_LOCATION: usize = 4;
const INSERT_CALL_FORWARDING: usize = 5;

const SUBSCRIBER_LEN: usize = 40;
/// Place of the number of changes of a subscriber, of its bits, and of its locations.
const CHANGES: usize = 22;
const BITS: usize = 30;
const MSC: usize = 32;
const VLR: usize = 36;
/// Location of every subscriber's switch.
const MSC_LOCATION: u32 = 97;
/// Places of a facility's fields.
const DATA_A: usize = 2;
const DATA_B: usize = 3;
const FACILITY_CHANGES: usize = 4;
/// What a call forwarding adds to the total of its subscriber.
const FORWARDING: i64 = 1 << 32;
/// Bytes by which the rows of a table are recognized.
const SECONDARY_MARK: u8 = 98;
const ACCESS_MARK: u8 = 99;
const FACILITY_MARK: u8 = 100;
const FORWARDING_MARK: u8 = 101;

/// Types of a subscriber's access infos and facilities.
const TYPES: u8 = 4;
/// Start times of call forwardings, in hours.
const STARTS: [u8; 3] = [0, 8, 16];

impl Benchmark for Tatp {
    const KINDS: Kinds = &[
        "get subscriber data",
        "get access data",
        "get new destination",
        "update subscriber data",
        "update location",
        "insert call forwarding",
        "delete call forwarding",
    ];

    fn units(&self) -> u64 {
        self.subscribers
    }

    fn rows_of_unit(&self) -> u64 {
        2 + 2 * u64::from(TYPES) + u64::from(TYPES) * STARTS.len() as u64
    }

    fn value_len(&self) -> usize {
        SUBSCRIBER_LEN
    }

    fn kind(&self, random: &mut Random) -> usize {
        of_mix(&MIX, random)
    }

    async fn load<T: Txn>(&self, txn: &mut T, unit: u64) -> Result<i64, Stop> {
        let (subscriber, mut random) = (unit as u32, loader(unit));
        let rows = Rows::of(&mut random);
        let mut whole = [0; SUBSCRIBER_LEN];
        whole.iter_mut().for_each(|byte| *byte = below(256, &mut random) as u8);
        whole[..15].copy_from_slice(&digits(subscriber));
        whole[CHANGES..BITS].fill(0);
        whole[MSC..VLR].copy_from_slice(&MSC_LOCATION.to_be_bytes());
        txn.put(&key(Table::Subscriber, subscriber, 0, 0), &whole)?;
        let mut secondary = [0; 8];
        secondary[..4].copy_from_slice(&subscriber.to_be_bytes());
        secondary[4] = SECONDARY_MARK;
        txn.put(&number_key(subscriber), &secondary)?;
        for access in 1..=TYPES {
            if rows.has_access(access) {
                let mut info = [0; 16];
                info[..10].iter_mut().for_each(|byte| *byte = below(256, &mut random) as u8);
                info[0] = ACCESS_MARK;
                txn.put(&key(Table::AccessInfo, subscriber, access, 0), &info)?;
            }
        }
        let mut total = 0;
        for kind in 1..=TYPES {
            if !rows.has_facility(kind) {
                continue;
            }
            let mut facility = [0; 8];
            facility[0] = u8::from(below(100, &mut random) < 85);
            facility[DATA_B] = FACILITY_MARK;
            txn.put(&key(Table::SpecialFacility, subscriber, kind, 0), &facility)?;
            for start in STARTS {
                if below(2, &mut random) == 0 {
                    let end = end_time(&mut random);
                    put_forwarding(txn, &key(Table::CallForwarding, subscriber, kind, start), end)?;
                    total += FORWARDING;
                }
            }
        }
        Ok(total)
    }

    async fn run<T: Txn>(
        &self,
        txn: &mut T,
        random: &mut Random,
        added: &mut Added,
    ) -> Result<Outcome, Stop> {
        let kind = self.kind(random);
        let subscriber = self.subscriber(random);
        match kind {
            GET_SUBSCRIBER_DATA => {
                read_subscriber(txn, subscriber).await?;
                Ok(Outcome::Done)
            }
            GET_ACCESS_DATA => {
                let key = key(Table::AccessInfo, subscriber, one_type(random), 0);
                let found = marked::<16>(txn, &key, 0, ACCESS_MARK).await?;
                Ok(if found.is_some() { Outcome::Done } else { Outcome::Failed })
            }
            GET_NEW_DESTINATION => {
                let (facility, start, end) = (one_type(random), below(3, random) as usize, end_time(random));
                self.new_destination(txn, subscriber, facility, start, end).await
            }
            UPDATE_SUBSCRIBER_DATA => {
                let facility = one_type(random);
                let [bits, data] = [below(1 << 16, random), below(256, random)];
                let done = update_subscriber(txn, subscriber, facility, bits as u16, data as u8).await?;
                if done == Outcome::Done {
                    added.push((subscriber.into(), 2)); // Of both rows.
                }
                Ok(done)
            }
            UPDATE_LOCATION => {
                let location = below(1 << 32, random) as u32;
                let subscriber = find_by_number(txn, subscriber).await?;
                let key = key(Table::Subscriber, subscriber, 0, 0);
                txn.fetch_to_write(&[&key], &[]).await?;
                let mut whole = read_subscriber(txn, subscriber).await?;
                whole[VLR..].copy_from_slice(&location.to_be_bytes());
                put_subscriber(txn, subscriber, whole)?;
                added.push((subscriber.into(), 1));
                Ok(Outcome::Done)
            }
            INSERT_CALL_FORWARDING => {
                let (kind, start, end) = (one_type(random), start_time(random), end_time(random));
                let subscriber = find_by_number(txn, subscriber).await?;
                if read_facility(txn, subscriber, kind).await?.is_none() {
                    return Ok(Outcome::Failed);
                }
                let key = key(Table::CallForwarding, subscriber, kind, start);
                txn.fetch_to_write(&[&key], &[]).await?;
                if read_forwarding(txn, &key).await?.is_some() {
                    return Ok(Outcome::Failed);
                }
                put_forwarding(txn, &key, end)?;
                added.push((subscriber.into(), FORWARDING));
                Ok(Outcome::Done)
            }
            _ => {
                let (kind, start) = (one_type(random), start_time(random));
                let subscriber = find_by_number(txn, subscriber).await?;
                let key = key(Table::CallForwarding, subscriber, kind, start);
                txn.fetch_to_write(&[&key], &[]).await?;
                if read_forwarding(txn, &key).await?.is_none() {
                    return Ok(Outcome::Failed);
                }
                txn.delete(&key)?;
                added.push((subscriber.into(), -FORWARDING));
                Ok(Outcome::Done)
            }
        }
    }

    /// A call forwarding row belongs to a facility, and access infos and facilities are those that were loaded.
    async fn audit<T: Txn>(&self, txn: &mut T, unit: u64) -> Result<i64, Stop> {
        let subscriber = unit as u32;
        let rows = Rows::of(&mut loader(unit));
        let mut keys = vec![key(Table::Subscriber, subscriber, 0, 0), number_key(subscriber)];
        for kind in 1..=TYPES {
            keys.extend(
                [Table::AccessInfo, Table::SpecialFacility].map(|table| key(table, subscriber, kind, 0)),
            );
            keys.extend(STARTS.map(|start| key(Table::CallForwarding, subscriber, kind, start)));
        }
        fetch(txn, &keys).await?;
        let whole = read_subscriber(txn, subscriber).await?;
        find_by_number(txn, subscriber).await?;
        let mut total = changes(&whole) as i64;
        for kind in 1..=TYPES {
            let access = key(Table::AccessInfo, subscriber, kind, 0);
            let has_access = marked::<16>(txn, &access, 0, ACCESS_MARK).await?.is_some();
            let facility = read_facility(txn, subscriber, kind).await?;
            let has_facility = facility.is_some();
            total += facility.map_or(0, |facility| i64::from(facility_changes(&facility)));
            if (has_access, has_facility) != (rows.has_access(kind), rows.has_facility(kind)) {
                return Err(Stop::Wrong(format!(
                    "subscriber {subscriber} has lost or gained an access info or a facility of type {kind}"
                )));
            }
            for start in STARTS {
                let found =
                    read_forwarding(txn, &key(Table::CallForwarding, subscriber, kind, start)).await?;
                if found.is_some() && !has_facility {
                    return Err(Stop::Wrong(format!(
                        "subscriber {subscriber} has a call forwarding of facility {kind}, which does not exist"
                    )));
                }
                total += if found.is_some() { FORWARDING } else { 0 };
            }
        }
        Ok(total)
    }
}

impl Tatp {
    /// Looks for a call forwarding that begins at `STARTS[start]` or earlier, and ends after `end`.
    async fn new_destination(
        &self,
        txn: &mut impl Txn,
        subscriber: u32,
        kind: u8,
        start: usize,
        end: u8,
    ) -> Result<Outcome, Stop> {
        let facility = read_facility(txn, subscriber, kind).await?;
        if facility.is_none_or(|[is_active, ..]| is_active == 0) {
            return Ok(Outcome::Failed);
        }
        let keys = STARTS.map(|start| key(Table::CallForwarding, subscriber, kind, start));
        let keys = &keys[..=start];
        fetch(txn, keys).await?;
        let mut is_found = false;
        for key in keys {
            is_found |= read_forwarding(txn, key).await?.is_some_and(|until| end < until);
        }
        Ok(if is_found { Outcome::Done } else { Outcome::Failed })
    }
}

async fn update_subscriber(
    txn: &mut impl Txn,
    subscriber: u32,
    kind: u8,
    bits: u16,
    data: u8,
) -> Result<Outcome, Stop> {
    let keys = [key(Table::Subscriber, subscriber, 0, 0), key(Table::SpecialFacility, subscriber, kind, 0)];
    txn.fetch_to_write(&[&keys[0], &keys[1]], &[]).await?;
    let mut whole = read_subscriber(txn, subscriber).await?;
    let Some(mut facility) = read_facility(txn, subscriber, kind).await? else {
        return Ok(Outcome::Failed);
    };
    whole[BITS..MSC].copy_from_slice(&bits.to_be_bytes());
    facility[DATA_A] = data;
    let changes = facility_changes(&facility) + 1;
    facility[FACILITY_CHANGES..].copy_from_slice(&changes.to_le_bytes());
    put_subscriber(txn, subscriber, whole)?;
    txn.put(&keys[1], &facility)?;
    Ok(Outcome::Done)
}

/// Tables, by the first byte of their keys.
#[derive(Clone, Copy)]
enum Table {
    Subscriber = 1,
    Secondary,
    AccessInfo,
    SpecialFacility,
    CallForwarding,
}

fn key(table: Table, subscriber: u32, kind: u8, start: u8) -> [u8; 8] {
    let [a, b, c, d] = subscriber.to_be_bytes();
    [table as u8, kind, start, 0, a, b, c, d]
}

/// Key of a subscriber's number: two digits in each byte.
fn number_key(subscriber: u32) -> [u8; 8] {
    let (mut key, mut rest) = ([0; 8], subscriber);
    key[0] = Table::Secondary as u8;
    for byte in key[1..].iter_mut().rev() {
        *byte = (((rest / 10 % 10) << 4) | (rest % 10)) as u8;
        rest /= 100;
    }
    key
}

/// The number of a subscriber, in ASCII.
fn digits(subscriber: u32) -> [u8; 15] {
    let (mut digits, mut rest) = ([b'0'; 15], subscriber);
    for digit in digits.iter_mut().rev() {
        *digit += (rest % 10) as u8;
        rest /= 10;
    }
    digits
}

/// Source of the rows that a subscriber is loaded with.
fn loader(unit: u64) -> Random {
    const SEED: u64 = 0x7a7b_0000_0000_0000;
    workload::random(SEED ^ unit)
}

/// Access infos and facilities of a subscriber: a bit for each type.
struct Rows {
    access: u8,
    facilities: u8,
}

impl Rows {
    /// Draws 1 to 4 types of each.
    fn of(random: &mut Random) -> Rows {
        let mut some = || {
            let (count, mut drawn) = (1 + below(TYPES.into(), random) as u32, 0u8);
            while drawn.count_ones() < count {
                drawn |= 1 << one_type(random);
            }
            drawn
        };
        Rows { access: some(), facilities: some() }
    }

    fn has_access(&self, kind: u8) -> bool {
        self.access >> kind & 1 == 1
    }

    fn has_facility(&self, kind: u8) -> bool {
        self.facilities >> kind & 1 == 1
    }
}

fn one_type(random: &mut Random) -> u8 {
    1 + below(TYPES.into(), random) as u8
}

fn start_time(random: &mut Random) -> u8 {
    STARTS[below(STARTS.len() as u64, random) as usize]
}

fn end_time(random: &mut Random) -> u8 {
    1 + below(24, random) as u8
}

/// Reads rows at the same time.
async fn fetch(txn: &mut impl Txn, keys: &[[u8; 8]]) -> Result<(), Stop> {
    let names: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    Ok(txn.fetch(&names).await?)
}

async fn read_subscriber(txn: &mut impl Txn, subscriber: u32) -> Result<[u8; SUBSCRIBER_LEN], Stop> {
    let key = key(Table::Subscriber, subscriber, 0, 0);
    let whole: [u8; SUBSCRIBER_LEN] = present(row(txn, &key).await?, &key)?;
    match whole[..15] == digits(subscriber) && whole[MSC..VLR] == MSC_LOCATION.to_be_bytes() {
        true => Ok(whole),
        false => Err(Stop::Wrong(format!("subscriber {subscriber} has the row {whole:02x?}"))),
    }
}

/// Writes a changed row of a subscriber, and counts the change.
fn put_subscriber(txn: &mut impl Txn, subscriber: u32, mut whole: [u8; SUBSCRIBER_LEN]) -> Result<(), Stop> {
    let changes = changes(&whole) + 1;
    whole[CHANGES..BITS].copy_from_slice(&changes.to_le_bytes());
    Ok(txn.put(&key(Table::Subscriber, subscriber, 0, 0), &whole)?)
}

/// Number of changes of a subscriber row.
fn changes(whole: &[u8; SUBSCRIBER_LEN]) -> u64 {
    u64::from_le_bytes(whole[CHANGES..BITS].try_into().expect("eight bytes"))
}

/// Number of changes of a facility row.
fn facility_changes(facility: &[u8; 8]) -> u32 {
    u32::from_le_bytes(facility[FACILITY_CHANGES..].try_into().expect("four bytes"))
}

/// Finds the subscriber that has a number: the one from which the number was made.
async fn find_by_number(txn: &mut impl Txn, subscriber: u32) -> Result<u32, Stop> {
    let key = number_key(subscriber);
    let found = present(marked::<8>(txn, &key, 4, SECONDARY_MARK).await?, &key)?;
    match found[..4] == subscriber.to_be_bytes() {
        true => Ok(subscriber),
        false => Err(Stop::Wrong(format!("the number of subscriber {subscriber} has the row {found:02x?}"))),
    }
}

async fn read_facility(txn: &mut impl Txn, subscriber: u32, kind: u8) -> Result<Option<[u8; 8]>, Stop> {
    marked(txn, &key(Table::SpecialFacility, subscriber, kind, 0), DATA_B, FACILITY_MARK).await
}

/// Returns the end time of a call forwarding, if the row exists.
async fn read_forwarding(txn: &mut impl Txn, key: &[u8; 8]) -> Result<Option<u8>, Stop> {
    let found = marked::<16>(txn, key, 1, FORWARDING_MARK).await?;
    match found {
        None => Ok(None),
        Some([end @ 1..=24, ..]) => Ok(Some(end)),
        Some([end, ..]) => Err(Stop::Wrong(format!("row {key:02x?} has the end time {end}"))),
    }
}

fn put_forwarding(txn: &mut impl Txn, key: &[u8; 8], end: u8) -> Result<(), Stop> {
    let mut value = [0; 16];
    value[..2].copy_from_slice(&[end, FORWARDING_MARK]);
    Ok(txn.put(key, &value)?)
}

/// Reads a row that has this mark at this place.
async fn marked<const N: usize>(
    txn: &mut impl Txn,
    key: &[u8; 8],
    place: usize,
    mark: u8,
) -> Result<Option<[u8; N]>, Stop> {
    let found: Option<[u8; N]> = row(txn, key).await?;
    match found {
        Some(value) if value[place] != mark => {
            Err(Stop::Wrong(format!("row {key:02x?} is of another table: {value:02x?}")))
        }
        found => Ok(found),
    }
}
