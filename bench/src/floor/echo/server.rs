//! The server of an echo: takes a message of requests, performs them with overlapping cache misses, and replies.
//!
//! Invariant: each request is answered once, in order.

use std::io;

use rustix::param::page_size;

use super::message::Requests;
use super::{Echo, Poller, TASKS_MAX};
use crate::floor::Layout;
use crate::floor::overwrite::Spare;
use crate::floor::table::{Key, Table, VALUE, key, last_byte};

/// Server's end of a channel, over any medium.
pub(super) trait ServerEnd {
    /// Number of polls before the server yields the CPU.
    const POLLS_PER_YIELD: u32;

    /// Takes and answers one message, if one has arrived.
    fn turn(&mut self, source: &mut ItemSource) -> io::Result<Turn>;
}

/// Outcome of [`ServerEnd::turn`], which tries to take and answer a message.
pub(super) enum Turn {
    Nothing,
    Answered,
    /// The client has closed the channel.
    Closed,
}

/// Answers messages until the client closes the channel.
pub(super) fn serve<S: ServerEnd>(mut far: S, source: &mut ItemSource) -> io::Result<()> {
    let mut poller = Poller::new(S::POLLS_PER_YIELD, None);
    loop {
        match far.turn(source)? {
            Turn::Nothing => poller.wait()?,
            Turn::Answered => poller.renew(),
            Turn::Closed => return Ok(()),
        }
    }
}

/// Source of the items that the server returns.
pub(super) enum ItemSource {
    /// The server fetches and overwrites the items of this table. It has a spare buffer for each request of a message.
    Table(Box<Table>, Vec<Spare>),
    /// The server returns this item, which stays in the cache.
    Bare(Vec<u8>),
}

impl ItemSource {
    pub(super) fn new(echo: &Echo) -> io::Result<Self> {
        if echo.bare {
            return Ok(Self::Bare(vec![0; echo.item_size()]));
        }
        let spares = echo.workload.spares() * echo.tasks_per_message() as u32;
        let (table, spares) = Table::build(Layout { spares, ..echo.layout })?;
        Ok(Self::Table(Box::new(table), spares))
    }

    /// Returns the size in bytes of a page of the memory that is read.
    pub(super) fn page_size(&self) -> usize {
        match self {
            Self::Table(table, _) => table.page_size(),
            Self::Bare(_) => page_size(),
        }
    }

    /// Checks that the requests have left whole values, and have lost no buffer.
    pub(super) fn check(&mut self) -> io::Result<()> {
        match self {
            Self::Table(table, spares) if !spares.is_empty() => table.check_buffers(spares),
            _ => Ok(()),
        }
    }

    /// Performs `requests`. Copies the items of fetches into `items`, which has one entry for each request; `value`
    /// returns the value of the overwrite with an index. Bit i of the result states whether key i was found.
    #[inline(always)]
    pub(super) fn answer<'a, 'v>(
        &mut self,
        requests: &Requests,
        value: impl Fn(usize) -> &'v [u8],
        items: impl Iterator<Item = &'a mut [u8]>,
    ) -> u64 {
        let numbers = requests.numbers();
        match self {
            Self::Table(table, spares) => {
                let mut homes = [0; TASKS_MAX];
                for (home, &number) in homes.iter_mut().zip(numbers) {
                    *home = table.home(&key(number));
                }
                if numbers.len() > 1 {
                    prefetch(table, requests, &homes);
                }
                let mut found = 0;
                for (index, ((&number, &home), item)) in numbers.iter().zip(&homes).zip(items).enumerate() {
                    let key = key(number);
                    let is_found = match requests.is_overwrite(index) {
                        true => table.overwrite(&key, home, value(index), &mut spares[index]),
                        false => table.fetch(&key, home, item),
                    };
                    found |= u64::from(is_found) << index;
                }
                found
            }
            Self::Bare(at_hand) => {
                for (index, (&number, item)) in numbers.iter().zip(items).enumerate() {
                    if requests.is_overwrite(index) {
                        continue;
                    }
                    item[..at_hand.len()].copy_from_slice(at_hand);
                    item[VALUE - size_of::<Key>()..VALUE].copy_from_slice(&key(number));
                    let value = &mut item[VALUE..at_hand.len()];
                    if let Some(first) = value.first_mut() {
                        *first = number as u8;
                    }
                    if let Some(last) = value.last_mut() {
                        *last = last_byte(number as u8, at_hand.len() - VALUE);
                    }
                }
                u64::MAX
            }
        }
    }
}

/// Prefetches all slots, then all items to fetch and all keys of items to overwrite.
#[inline(always)]
fn prefetch(table: &Table, requests: &Requests, homes: &[usize; TASKS_MAX]) {
    let homes = &homes[..requests.numbers().len()];
    for &home in homes {
        table.prefetch_slot(home);
    }
    for (index, &home) in homes.iter().enumerate() {
        match requests.is_overwrite(index) {
            true => table.prefetch_key(home),
            false => table.prefetch_item(home),
        }
    }
}
