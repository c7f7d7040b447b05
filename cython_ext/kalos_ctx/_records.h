// _records.h: what makes a log record valid, and where its sections lie. FORMAT.md has the words.
#ifndef KALOS_RECORDS_H
#define KALOS_RECORDS_H

#include "_checks.h"
#include "kalos_layout.h"

typedef struct kalos_sections {
  const kalos_change* change;
  const kalos_roots* roots;  // NULL for none
  const kalos_extent* extents;
  const char* name;
  const char* tenant;
  const char* key;
  const char* group;
  const char* text;
  const char* metadata;
  const char* table;
  const char* tokens;
  const char* live;
  const char* vector;
} kalos_sections;

static inline uint32_t kalos_record_crc(uint64_t salt, const kalos_record* rec) {
  uint64_t seed[2] = {salt, rec->lsn};
  return kalos_crc32c(kalos_crc32c(0, seed, 16), (const char*)rec + 8, sizeof(*rec) - 8);
}

static inline uint64_t kalos_round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// Every record's header is valid if and only if this holds; `room` is the bytes from it to the
// file's end.
static inline int kalos_header_valid(uint64_t salt, const kalos_record* rec, uint64_t lsn,
                                     uint64_t room) {
  return rec->magic == KALOS_RECORD_MAGIC && rec->lsn == lsn && rec->size % KALOS_ALIGN == 0 &&
         rec->size >= sizeof(kalos_record) + sizeof(kalos_change) && rec->size <= room &&
         rec->body_len >= sizeof(kalos_change) &&
         rec->body_len <= rec->size - sizeof(kalos_record) && rec->kind >= 1 &&
         rec->kind <= KALOS_KIND_LAST && rec->header_crc == kalos_record_crc(salt, rec);
}

static inline int kalos_body_holds(const kalos_record* rec) {
  return rec->body_crc == kalos_crc32c(0, (const char*)rec + sizeof(*rec), rec->body_len);
}

// A scrubbed record stays valid where the scrubbing was interrupted; what it says is then used only
// where its body holds.
static inline int kalos_body_valid(const kalos_record* rec) {
  return (rec->flags & KALOS_RECORD_SCRUBBED) || kalos_body_holds(rec);
}

// The sections of a valid record; 0 where their lengths do not fit its body. A scrubbed one has
// only the roots: where the blocks of slots lie concerns every session, not just the erased one.
static inline int kalos_sections_of(const kalos_record* rec, kalos_sections* out) {
  const char* p = (const char*)rec + sizeof(*rec);
  const kalos_change* c = (const kalos_change*)p;
  memset(out, 0, sizeof(*out));
  out->change = c;
  if (rec->flags & KALOS_RECORD_SCRUBBED) {
    if ((rec->flags & KALOS_RECORD_ROOTS) && rec->body_len >= sizeof(*c) + sizeof(kalos_roots))
      out->roots = (const kalos_roots*)(p + sizeof(*c));
    return 1;
  }
  uint64_t need = sizeof(*c) + ((rec->flags & KALOS_RECORD_ROOTS) ? sizeof(kalos_roots) : 0) +
                  (uint64_t)c->num_extents * sizeof(kalos_extent) + c->name_len +
                  (uint64_t)c->tenant_len + c->key_len + (uint64_t)c->group_len + c->text_len +
                  (uint64_t)c->metadata_len + c->table_len + (uint64_t)c->tokens_len + c->live_len +
                  (uint64_t)c->vector_len;
  if (need != rec->body_len) return 0;
  p += sizeof(*c);
  if (rec->flags & KALOS_RECORD_ROOTS) {
    out->roots = (const kalos_roots*)p;
    p += sizeof(kalos_roots);
  }
  out->extents = (const kalos_extent*)p;
  p += (uint64_t)c->num_extents * sizeof(kalos_extent);
  out->name = p, p += c->name_len;
  out->tenant = p, p += c->tenant_len;
  out->key = p, p += c->key_len;
  out->group = p, p += c->group_len;
  out->text = p, p += c->text_len;
  out->metadata = p, p += c->metadata_len;
  out->table = p, p += c->table_len;
  out->tokens = p, p += c->tokens_len;
  out->live = p, p += c->live_len;
  out->vector = p;
  return 1;
}

// ---- What is known of a vector row --------------------------------------------------------------

static inline uint64_t kalos_row_context(const kalos_row* r, uint64_t row) {
  uint32_t factor;
  memcpy(&factor, &r->factor, 4);
  return ((uint64_t)r->crc << 32 | factor) ^ row * 0x9e3779b97f4a7c15ULL;
}

static inline void kalos_row_write(kalos_row* r, uint64_t row, uint32_t crc, float factor,
                                   uint64_t entry, int dead) {
  r->crc = crc;
  r->factor = factor;
  __atomic_store_n(&r->entry,
                   kalos_seal(entry | (dead ? KALOS_ROW_DEAD : 0), kalos_row_context(r, row)),
                   __ATOMIC_RELEASE);
}

// 1 and where the row's entry lies and whether it is dead; 0 where the row does not prove itself.
static inline int kalos_row_holds(const kalos_row* r, uint64_t row, uint64_t* entry, int* dead) {
  uint64_t value;
  if (!kalos_unseal(__atomic_load_n(&r->entry, __ATOMIC_ACQUIRE), kalos_row_context(r, row),
                    &value))
    return 0;
  *dead = (value & KALOS_ROW_DEAD) != 0;
  *entry = value & ~KALOS_ROW_DEAD;
  return 1;
}

#endif  // KALOS_RECORDS_H
