//! Datagrams that a client receives: WELCOME, REFUSED, GONE, PONG, and the entries of a DATA.
//!
//! Invariant: a datagram has an effect only if it has the session's secret, or the nonce before there is a session.

use super::super::packet::{
    self, Datagram, ENTRY, Entries, Foreign, Kind, LastBytes, PacketError, VERSION, WelcomeBytes, all, chunk,
};
use super::super::server::last;
use super::super::{DATAGRAM_MIN, MESSAGE_BYTES_MAX, PINGS, WINDOW_MAX};
use super::slot::Slot;
use super::{Client, Event, Fate, Granted, Lost, Stage};
use std::time::Duration;
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

impl Client {
    /// Handles a received datagram.
    ///
    /// # Errors
    /// The datagram had no effect, for the returned reason, which may be logged. The counters include it.
    pub fn receive(&mut self, now: Duration, bytes: &[u8]) -> Result<(), PacketError> {
        self.counters.datagrams_in += 1;
        self.notice_pause(now);
        let result = self.take_in(now, bytes);
        match result {
            Ok(()) => {}
            Err(PacketError::Secret) => self.counters.bad_secrets += 1,
            Err(PacketError::Session(_)) => self.counters.stale += 1,
            Err(_) => self.counters.malformed += 1,
        }
        result
    }

    fn take_in(&mut self, now: Duration, bytes: &[u8]) -> Result<(), PacketError> {
        let datagram = match Datagram::decode(bytes, self.config.is_reliable) {
            Err(PacketError::Version(version)) => {
                self.other_version(bytes);
                return Err(PacketError::Version(version));
            }
            datagram => datagram?,
        };
        match datagram.kind {
            Kind::Welcome | Kind::Refused => {
                if !packet::same(datagram.secret, self.config.nonce) {
                    return Err(PacketError::Secret);
                }
                if self.stage != Stage::Greeting {
                    self.counters.duplicates += 1;
                    return Ok(());
                }
                if datagram.kind == Kind::Welcome {
                    return self.welcome(now, datagram.body);
                }
                self.refuse(String::from_utf8_lossy(datagram.body).into_owned());
                return Ok(());
            }
            Kind::Data | Kind::Pong | Kind::Gone => {}
            kind => return Err(PacketError::Kind(kind as u8)),
        }
        if self.stage != Stage::Open || datagram.session != self.session {
            return Err(PacketError::Session(datagram.session));
        }
        if !packet::same(datagram.secret, self.secret) {
            return Err(PacketError::Secret);
        }
        match datagram.kind {
            Kind::Gone => return self.gone(datagram.body),
            Kind::Data => {
                for entry in Entries::validate(datagram.body, self.chunk, |_, _| {})? {
                    self.counters.entries_in += 1;
                    self.entry(now, &entry);
                }
                self.resend_overtaken();
            }
            _ if !datagram.body.is_empty() => return Err(PacketError::Length),
            _ => {}
        }
        self.pings = 0;
        self.ping = false;
        self.ping_at = now + self.period;
        Ok(())
    }

    fn welcome(&mut self, now: Duration, body: &[u8]) -> Result<(), PacketError> {
        let welcome = WelcomeBytes::ref_from_bytes(body).map_err(|_| PacketError::Length)?;
        let granted = Granted {
            node: welcome.node.get(),
            features: welcome.features.get(),
            window: welcome.window.into(),
            datagram: welcome.datagram.get() as usize,
            credit: welcome.credit.get() as usize,
            assembly: welcome.assembly.get() as usize,
            eager: welcome.eager.into(),
        };
        if !(1..=WINDOW_MAX).contains(&granted.window) {
            return Err(PacketError::Field("window"));
        }
        if !(DATAGRAM_MIN..=self.config.datagram).contains(&granted.datagram) {
            return Err(PacketError::Field("limit of datagrams"));
        }
        if granted.credit < ENTRY + chunk(granted.datagram) || granted.assembly < MESSAGE_BYTES_MAX {
            return Err(PacketError::Field("credit"));
        }
        if !(1..=64).contains(&granted.eager) {
            return Err(PacketError::Field("share of a reply"));
        }
        if self.config.features & !granted.features != 0 {
            self.refuse(format!(
                "the client asks for features {:#x}, the node has {:#x}; use a node and a client of one release",
                self.config.features, granted.features
            ));
            return Ok(());
        }
        let silence = Duration::from_millis(welcome.silence_ms.get().into()).max(Duration::from_millis(10));
        self.period = self.config.silence.min(silence) / PINGS;
        self.ping_at = now + self.period;
        self.session = welcome.session.get();
        self.secret = welcome.secret.get();
        self.chunk = chunk(granted.datagram);
        self.slots = (0..granted.window).map(|_| Slot::new()).collect();
        self.free = all(granted.window);
        self.granted = granted;
        self.stage = Stage::Open;
        self.counters.opened += 1;
        self.events.push_back(Event::Open(granted));
        Ok(())
    }

    fn other_version(&mut self, bytes: &[u8]) {
        if let Some(foreign) = Foreign::decode(bytes)
            && self.stage == Stage::Greeting
            && foreign.kind == Kind::Refused as u8
            && packet::same(foreign.secret, self.config.nonce)
        {
            self.refuse(format!(
                "the node speaks version {} of datagram sessions, this client speaks {VERSION}; use a node and a \
                 client of one release",
                foreign.version
            ));
        }
    }

    fn refuse(&mut self, reason: String) {
        self.counters.refused += 1;
        self.stage = Stage::Ended { bye: false };
        self.events.push_back(Event::Refused(reason));
    }

    fn gone(&mut self, body: &[u8]) -> Result<(), PacketError> {
        if body.is_empty() {
            self.lose(Lost::Gone, |_| Fate::Unknown);
            return Ok(());
        }
        let (count, rest) = U32::ref_from_prefix(body).map_err(|_| PacketError::Length)?;
        let (fenced, slots) = U32::ref_from_prefix(rest).map_err(|_| PacketError::Length)?;
        let slots = <[LastBytes]>::ref_from_bytes(slots).map_err(|_| PacketError::Length)?;
        if count.get() as usize != slots.len() || slots.len() != self.granted.window {
            return Err(PacketError::Field("count of slots"));
        }
        let why = match fenced.get() {
            0 => Lost::Gone,
            1 => Lost::Fenced,
            _ => return Err(PacketError::Field("reason of the end")),
        };
        let numbers: Vec<u32> = self.slots.iter().map(|slot| slot.number).collect();
        self.lose(why, |index| {
            let known = slots[index].number.get();
            match slots[index].state.get() {
                last::RAN if known == numbers[index] => Fate::DidRun,
                last::NO if known == numbers[index] => Fate::DidNotRun,
                // The server has not seen this request, and will accept no further datagram of this session.
                last::NO | last::RAN if known.wrapping_add(1) == numbers[index] => Fate::DidNotRun,
                _ => Fate::Unknown,
            }
        });
        Ok(())
    }
}
